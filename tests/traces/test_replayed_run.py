"""A run whose steps are replayed leaves the trace of the eager run, but for spans and times."""

import pytest
import torch

import sfi_core
from sfi_core import AuditConfig, EngineOptions, SfiConfig
from sfi_core.sizes.step import ByteModel
from sfi_traces import ParquetObserver, Trace
from sfi_traces.schema import TABLES
from sfi_traces.summary import summarize
from tests.core.conftest import tiny_qwen3
from tests.fake_graph import FakeRecorder, use_tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on CPU tensors")
PROMPTS = [list(range(5, 45)), list(range(3, 28)), list(range(9, 20))]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=8, budget=6, t_max=2, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 7)), trigger_delay=1, dense_layers=(1,),
)  # fmt: skip
SPANS = {"forward", "sample", "prefill"}  # those outside of layers
# what differs from one run to another one that does the same
OWN = {"elapsed_us", "begin_us", "graphs"}


def recorded(
    folder, graphs: bool | None, audit: AuditConfig | None = None, config: SfiConfig = CONFIG, **options
) -> Trace:
    with ParquetObserver(folder, positions=True, **options) as observer:
        sfi_core.generate(
            tiny_qwen3(), None, PROMPTS, config, page_size=16, stop_token_ids=(),
            max_batch=2, max_new_tokens=[12, 5, 8], observers=[observer],
            engine=EngineOptions(backend="triton", graphs=graphs), audit=audit,
        )  # fmt: skip
    return Trace.open(folder)


@pytest.fixture
def recorder(monkeypatch) -> FakeRecorder:
    fake = FakeRecorder()
    fake.install(monkeypatch)
    use_tensors(monkeypatch)
    return fake


@pytest.fixture
def traces(tmp_path, recorder) -> tuple[Trace, Trace]:
    """The same run, eager and replayed: a ragged batch of two, which a third request joins."""
    return recorded(tmp_path / "eager", False), recorded(tmp_path / "replayed", None)


def rows(trace: Trace, table: str) -> list[dict]:
    table_rows = [
        {name: value for name, value in row.items() if name not in OWN} for row in trace.table(table).to_pylist()
    ]
    if table == "timings":
        return [row for row in table_rows if row["layer"] is None and row["name"] in SPANS]
    return table_rows


def in_order(table_rows: list[dict]) -> list[dict]:
    keys = ("request", "step", "position", "layer", "head", "name")
    return sorted(table_rows, key=lambda row: [str(row.get(key)) for key in keys])


def assert_alike(row: dict, other: dict) -> None:
    for name, value in other.items():
        if isinstance(value, float):
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, other)
        else:
            assert row[name] == value, (name, other)


def test_every_table_is_the_eager_one_s_but_for_spans_and_times(traces, recorder):
    eager, replayed = traces
    for table in TABLES:
        ours, theirs = in_order(rows(replayed, table)), in_order(rows(eager, table))
        assert len(ours) == len(theirs), table
        for row, other in zip(ours, theirs, strict=True):
            assert_alike(row, other)
    assert len(rows(replayed, "steps")) == 25
    refreshes = {(row["request"], row["step"]) for row in rows(replayed, "selections")}
    assert len(refreshes) == sum(row["slow"] for row in rows(replayed, "steps")) > 9
    steps = replayed.table("steps").to_pylist()
    batch = {row["batch_step"]: row["graphs"] for row in steps if row["step"] > 0}
    assert recorder.plays > 0
    assert 0 < sum(batch.values()) < len(batch), "the first slow step of each kind is not replayed"
    assert not any(row["graphs"] for row in steps if row["step"] == 0)
    assert not any(row["graphs"] for row in eager.table("steps").to_pylist())
    assert (eager.manifest["graphs"], replayed.manifest["graphs"]) == (False, True)
    spans = replayed.table("timings").to_pylist()
    decoding = {row["name"] for row in spans if batch.get(row["step"]) is not None}
    assert decoding == {"forward", "sample"}, "no span of a layer"
    assert "attention.fast" in {row["name"] for row in eager.table("timings").to_pylist()}


def test_audited_steps_run_eagerly_between_replays(tmp_path, recorder):
    """What they see of the step before them, its query, comes from the graphs' buffers."""
    audit, config = AuditConfig(every=4, top=8), CONFIG.replace(t_max=5, trigger_token_ids=())
    eager, replayed = (recorded(tmp_path / str(graphs), graphs, audit, config=config) for graphs in (False, True))
    for table in ("steps", "selections", "supports", "logits"):
        ours, theirs = in_order(rows(replayed, table)), in_order(rows(eager, table))
        assert len(ours) == len(theirs), table
        for row, other in zip(ours, theirs, strict=True):
            assert_alike(row, other)
    assert recorder.plays > 0
    steps = replayed.table("steps").to_pylist()
    assert not any(row["graphs"] for row in steps if row["audited"])
    before = {(row["request"], row["step"]) for row in steps if row["graphs"]}
    supports = [row for row in rows(replayed, "supports") if (row["request"], row["step"] - 1) in before]
    assert supports
    assert all(row["query_cosine"] is not None for row in supports)


def test_a_step_has_the_shape_that_the_model_of_bytes_gives(traces):
    """From the rows of its requests; layer 1 is left dense, and no layer has a window."""
    _, trace = traces
    bytes_ = ByteModel.of({**trace.manifest["model"], "weight_bytes": 0}, dense_layers=(1,))
    steps = trace.table("steps").to_pylist()
    for row in steps:
        mates = [mate for mate in steps if mate["batch_step"] == row["batch_step"]]
        assert row["slow_requests"] == sum(mate["slow"] for mate in mates)
        assert row["fast_requests"] == sum(not mate["slow"] for mate in mates)
        assert row["cached_tokens"] == sum(mate["context_tokens"] for mate in mates)
        expected = 0.0
        for mate in mates:
            length, attended = mate["context_tokens"], mate["attended_tokens"]
            sparse = 2 * attended - length  # the mean over a sparse layer and a dense one
            expected += bytes_.dense(length) if mate["slow"] else bytes_.fast(length, sparse)
        assert row["moved_bytes"] == expected
    assert {row["fast_requests"] for row in steps} == {0, 1, 2}


def test_who_asks_for_spans_gives_graphs_up_and_the_trace_says_so(tmp_path, recorder):
    trace = recorded(tmp_path / "run", None, spans=True)
    assert recorder.tapes == 0
    assert trace.manifest["graphs"] is False
    assert trace.manifest["not_replayed"].startswith("CUDA graphs must be off with spans inside")
    names = {row["name"] for row in trace.table("timings").to_pylist() if row["step"] > 0}
    assert {"attention.fast", "pack"} <= names
    summary = summarize(trace)
    assert summary["run"]["not_replayed"] == trace.manifest["not_replayed"]
    assert not any("replayed" in line for line in summary["missing"])
