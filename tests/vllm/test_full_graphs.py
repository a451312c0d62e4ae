"""FULL decode graphs: vLLM dispatches, pads, captures and replays by itself, on a CPU, over a tape."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM
from vllm.config import CUDAGraphMode

from sfi_core.hosts.serving.rows import EVIDENCE
from sfi_core.hosts.vllm import names
from sfi_traces.model.trace import Trace
from tests.fake_graph import use_tensors
from tests.vllm import engines
from tests.vllm.cuda_graphs import SIZES, capture, graphs_on
from tests.vllm.test_cuda_backend import plain_backend
from tests.vllm.test_traces import traced

EXTRA = {"budget": 24, "recent": 16, "sink": 4, "window_prefill": 3, "t_max": 6}
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 512, "block_size": 32}
# the last piece of 1, 65 and 129 is a single token, which vLLM takes for a decoding row
IDS = [[5 + (7 * place + length) % 400 for place in range(length)] for length in (1, 65, 129, 300, 65)]


@contextmanager
def launching(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], make: Any = engines.engine, **options: Any
) -> Iterator[LLM]:
    """Make an engine as on a GPU, with plain tensors in the place of kernels."""
    use_tensors(monkeypatch)
    monkeypatch.setattr(names, "backend_of", lambda _: "triton")
    with plain_backend(), make(extra, **OPTIONS | options) as llm:
        mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode
        assert mode in {CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY}
        yield llm


def answers(llm: LLM, ids: list[list[int]], most: int = 24) -> list[Any]:
    done = engines.ask(llm, ids, max_tokens=[most + 5 * place for place in range(len(ids))])
    return [(list(o.outputs[0].token_ids), engines.told(o)) for o in done]


@pytest.mark.parametrize(
    ("slots", "blocks"),
    [pytest.param(4, 200, id="turns"), pytest.param(2, 200, id="dense"), pytest.param(4, 14, id="preempted")],
)
def test_replayed_steps_equal_eager_ones(monkeypatch: pytest.MonkeyPatch, slots: int, blocks: int):
    """Also with rows that wait for a slow step, with rows without a slot, and with requests that lose their blocks."""
    extra, few = EXTRA | {"slots": slots}, {"num_gpu_blocks_override": blocks, "max_model_len": 384}
    with launching(monkeypatch, extra, **few) as llm:
        wanted = answers(llm, IDS)
    recorder = graphs_on(monkeypatch)
    with launching(monkeypatch, extra, **few) as llm:
        capture(llm)
        assert recorder.tapes == len(SIZES)
        graphed = answers(llm, IDS)
        engines.assert_nothing_is_left(llm)
    assert graphed == wanted
    assert recorder.plays > 30
    dense, preempted = (sum(report[name] for _, report in graphed) for name in ("dense_steps", "preempted"))
    assert (dense > 0, preempted > 0) == (slots == 2, blocks == 14)


def test_two_at_once_equal_the_cpu_s_backend(monkeypatch: pytest.MonkeyPatch):
    """Nobody waits then: tokens, slow steps and reads are those that `sfi generate` has, too."""
    assert EVIDENCE == 2
    with engines.engine(EXTRA, **OPTIONS | {"max_num_seqs": 2}) as llm:
        wanted = answers(llm, IDS)
    graphs_on(monkeypatch)
    with launching(monkeypatch, EXTRA, max_num_seqs=2) as llm:
        capture(llm)
        assert answers(llm, IDS) == wanted


@pytest.mark.parametrize("policy", ["streaming-llm", "codescan", "quest", "oracle-top-k"])
def test_every_policy_gives_the_same_in_graphs_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch, policy: str):
    """Kernels that choose run in Triton's interpreter: few steps."""
    extra, ids = {**EXTRA, "policy": policy}, IDS[1:3]
    with engines.engine(extra, **OPTIONS) as llm:
        wanted = answers(llm, ids, 10)
    recorder = graphs_on(monkeypatch)
    with launching(monkeypatch, extra) as llm:
        capture(llm)
        assert answers(llm, ids, 10) == wanted
        engines.assert_nothing_is_left(llm)
    assert recorder.plays > 8


def test_what_replayed_steps_choose_and_what_audits_find_reaches_the_trace(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    extra = {**EXTRA, "policy": "oracle-top-k", "trace_audit": 2}
    with traced({**extra, "trace": str(tmp_path / "cpu")}, **OPTIONS) as llm:
        wanted = answers(llm, IDS[1:3])
    graphs_on(monkeypatch)
    with launching(monkeypatch, {**extra, "trace": str(tmp_path / "graphs")}, make=traced) as llm:
        capture(llm)
        assert answers(llm, IDS[1:3]) == wanted
    both = [Trace.open(tmp_path / folder) for folder in ("cpu", "graphs")]
    ours, theirs = (rows_of(trace, "selections", "positions") for trace in both)
    assert ours.keys() == theirs.keys()
    same = [ours[key] == theirs[key] for key in ours]
    assert sum(same) > 0.95 * len(same) > 100, "the exact scores of two keys may lie as close as a sum's rounding"
    ours, theirs = (rows_of(trace, "supports", "retained_mass") for trace in both)
    assert ours.keys() == theirs.keys()
    assert ours == {key: pytest.approx(mass, abs=1e-3) for key, mass in theirs.items()}
    assert min(ours.values()) < 0.999


def rows_of(trace: Trace, table: str, column: str) -> dict[tuple[int, ...], Any]:
    """Return a column by request, step, layer and KV head."""
    names = "request", "step", "layer", "head"
    return {tuple(row[name] for name in names): row[column] for row in trace.table(table).to_pylist()}
