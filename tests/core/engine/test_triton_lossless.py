"""Lossless runs on the triton backend draft, verify and select as those of the torch backend do.

Without a GPU the references stand in for the kernels, which tests/kernels compares with them.
"""

import pytest
import torch

from sfi_core import EngineOptions, SfiConfig, generate
from sfi_core.settings.config import DraftConfig
from tests.architectures import prompts, tiny
from tests.fakes import use_references

pytestmark = pytest.mark.seam

ROWS, STEPS = prompts(9, 70, 24), 14
CONFIG = SfiConfig(
    sink=2, recent=6, budget=5, t_max=6, min_gap=0, span=0, window_prefill=8, trigger_token_ids=tuple(range(0, 300, 6))
)


@pytest.mark.parametrize(
    ("rows", "policy"),
    [(ROWS, "sfi"), (ROWS[1:2], "sfi"), (ROWS, "codescan"), (ROWS, "snapkv")],
    ids=["ragged", "alone", "codescan", "snapkv"],
)
def test_both_backends_draft_and_verify_alike(rows: list[list[int]], policy: str, monkeypatch):
    """What a verification selects shows in the next drafts, and how many of them are kept."""
    if not torch.cuda.is_available():
        use_references(monkeypatch)
    # more drafts than recent tokens: taken back values were in the sums of codescan
    recent = {"recent": 3} if policy == "codescan" else {}
    config = CONFIG.replace(draft=DraftConfig(max_tokens=5, adaptive=False), **recent)
    model = tiny("qwen3").to("cuda" if torch.cuda.is_available() else "cpu")
    runs = [
        generate(
            model, None, rows, config, policy=policy, stop_token_ids=(),
            max_new_tokens=STEPS, engine=EngineOptions(backend=backend, lossless=True),
        ).report.requests
        for backend in ("torch", "triton")
    ]  # fmt: skip
    torch_requests, triton_requests = runs
    assert [one.token_ids for one in triton_requests] == [one.token_ids for one in torch_requests]
    assert [one.lossless for one in triton_requests] == [one.lossless for one in torch_requests]
    assert max(one.lossless.tested for one in triton_requests) > 0
