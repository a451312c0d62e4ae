"""FULL decode graphs: vLLM dispatches, pads, captures and replays by itself, on a CPU, over a tape."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import LLM
from vllm.config import CUDAGraphMode

from sfi_core.hosts.vllm import names
from sfi_core.hosts.vllm.rows import EVIDENCE
from tests.fake_graph import use_tensors
from tests.vllm import engines
from tests.vllm.cuda_graphs import SIZES, capture, graphs_on
from tests.vllm.test_cuda_backend import plain_backend

EXTRA = {"budget": 24, "recent": 16, "sink": 4, "window_prefill": 3, "t_max": 6}
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 512, "block_size": 32}
# the last piece of 1, 65 and 129 is a single token, which vLLM takes for a decoding row
IDS = [[5 + (7 * place + length) % 400 for place in range(length)] for length in (1, 65, 129, 300, 65)]


@contextmanager
def launching(monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """Make an engine as on a GPU, with plain tensors in the place of kernels."""
    use_tensors(monkeypatch)
    monkeypatch.setattr(names, "backend_of", lambda _: "triton")
    with plain_backend(), engines.engine(extra, **OPTIONS | options) as llm:
        assert engines.engine_of_process().launch is not None
        yield llm


def answers(llm: LLM, ids: list[list[int]]) -> list[Any]:
    done = engines.ask(llm, ids, max_tokens=[24 + 5 * place for place in range(len(ids))])
    return [(list(o.outputs[0].token_ids), engines.told(o)) for o in done]


@pytest.mark.parametrize("slots", [4, 2])
def test_replayed_steps_equal_eager_ones(monkeypatch: pytest.MonkeyPatch, slots: int):
    """Also with rows that wait for a slow step, and with rows without a slot."""
    with launching(monkeypatch, EXTRA | {"slots": slots}) as llm:
        wanted = answers(llm, IDS)
    recorder = graphs_on(monkeypatch)
    with launching(monkeypatch, EXTRA | {"slots": slots}) as llm:
        capture(llm)
        assert recorder.tapes == len(SIZES)
        found = answers(llm, IDS)
        engines.assert_nothing_is_left(llm)
    assert found == wanted
    assert recorder.plays > 30
    dense = [told["dense_steps"] for _, told in found]
    assert (max(dense) > 0) == (slots == 2)


def test_two_at_once_equal_the_cpu_s_backend(monkeypatch: pytest.MonkeyPatch):
    """Nobody waits then: tokens, slow steps and reads are those that `sfi generate` has, too."""
    assert EVIDENCE == 2
    with engines.engine(EXTRA, **OPTIONS | {"max_num_seqs": 2}) as llm:
        wanted = answers(llm, IDS)
    graphs_on(monkeypatch)
    with launching(monkeypatch, EXTRA, max_num_seqs=2) as llm:
        capture(llm)
        assert answers(llm, IDS) == wanted


@pytest.mark.parametrize(("policy", "mode"), [("streaming-llm", "FULL_DECODE_ONLY"), ("codescan", "NONE")])
def test_a_policy_that_chooses_at_each_step_stays_out_of_graphs(monkeypatch: pytest.MonkeyPatch, policy, mode):
    graphs_on(monkeypatch)
    with engines.engine({**EXTRA, "policy": policy}, **OPTIONS) as llm:
        wanted = answers(llm, IDS[:3])
    use_tensors(monkeypatch)
    monkeypatch.setattr(names, "backend_of", lambda _: "triton")
    with plain_backend(), engines.engine({**EXTRA, "policy": policy}, **OPTIONS) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.cudagraph_mode == CUDAGraphMode[mode]
        assert (engines.engine_of_process().launch is None) == (mode == "NONE")
        if mode != "NONE":
            capture(llm)
            assert answers(llm, IDS[:3]) == wanted
