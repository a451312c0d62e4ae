"""The first selections of prompts that end in one pass, on the Triton backend: together, and as if alone."""

from typing import Any

import torch

from sfi_core.engine import maintenance
from tests.core.engine.test_triton_backend import PROMPTS, complete, tokens
from tests.fakes import RecordingObserver

LONG = [PROMPTS[0][:40], PROMPTS[1], PROMPTS[0][:24]]


def observed(prompts: list[list[int]], **options: Any) -> tuple[Any, RecordingObserver]:
    observer = RecordingObserver()
    options = {"max_new_tokens": 2, **options}
    return complete("triton", prompts, observers=[observer], **options), observer


def launches(result: Any) -> int:
    return {kernel.name: kernel.launches for kernel in result.report.kernels}["window_logits"]


def test_neighbors_share_launches_and_every_event_stays(monkeypatch):
    """A prompt of 7 tokens, shorter than the budget, is on its own."""
    prompts = [*LONG, PROMPTS[2]]
    together, events = observed(prompts, prefill_chunk=30)
    monkeypatch.setattr(maintenance, "TOGETHER", 1)
    alone, expected = observed(prompts, prefill_chunk=30)
    assert (launches(together), launches(alone)) == (2 * 1, 2 * 3)  # layers; 7 tokens have no candidates
    assert tokens(together) == tokens(alone)
    assert together.report.paths == alone.report.paths
    assert len(events.selections) == len(expected.selections)
    for one, other in zip(events.selections, expected.selections, strict=True):
        assert (one.request, one.step, one.layer) == (other.request, other.step, other.layer)
        assert torch.equal(one.index_HK, other.index_HK)
        for name, value in other.diagnostics.items():
            torch.testing.assert_close(one.diagnostics[name], value)


def test_long_prompts_are_few_at_a_time(monkeypatch):
    monkeypatch.setattr(maintenance, "TOGETHER", 2 * 4 * 4 * 40)  # query heads, window, tokens
    assert launches(observed(LONG, max_new_tokens=1)[0]) == 2 * 2
