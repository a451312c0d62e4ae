"""The thread that writes a trace, and what the first of several ranks records of the others."""

import threading
import time
from itertools import count, islice

import pytest
import torch

from sfi_core.distributed.ranks import Ranks
from sfi_core.errors import RankLostError
from sfi_core.machine import files
from sfi_core.observers.events import BeginStepEvent, SelectionEvent
from sfi_traces import ParquetObserver, Trace
from sfi_traces.record import parquet
from sfi_traces.record import writer as trace_writer
from sfi_traces.record.folder import PartFiles, describe_run
from sfi_traces.record.rows import TraceRows
from sfi_traces.record.writer import TraceWriter, next_parts
from tests.traces.small import rows
from tests.traces.told import HEADS, Told, run_event, step_event, wait_for


@pytest.fixture(autouse=True)
def _at_once(monkeypatch) -> None:
    monkeypatch.setattr(parquet, "PATIENCE", 0.0)


def tell(observer, steps) -> None:
    for step in steps:
        observer.on(BeginStepEvent(step=step, slow=(), fast=(0,)))
        with observer.span("forward"):
            pass
        observer.on(step_event(0, step))


def written(folder) -> list[int]:
    return Trace.open(folder).table("steps")["step"].to_pylist()


def leftovers(folder) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def test_a_table_s_parts_join_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "PART_BYTES", 8 * 512)
    with ParquetObserver(tmp_path / "trace") as observer:
        observer.on(run_event(1))
        tell(observer, range(100))
    trace = Trace.open(tmp_path / "trace")
    names = [part.name for part in trace.parts("steps")]
    assert len(names) > 5
    assert names == [f"part-{number:05d}.parquet" for number in range(len(names))]
    assert trace.table("steps")["step"].to_pylist() == list(range(100))
    assert trace.table("timings")["step"].to_pylist() == list(range(100))
    assert trace.manifest["tables"]["steps"] == 100
    assert leftovers(tmp_path / "trace") == []


def test_parts_are_cut_while_nothing_happens(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "SOONEST", 0.05)
    with ParquetObserver(tmp_path / "trace") as observer:
        observer.on(run_event(1))
        tell(observer, range(5))
        wait_for(lambda: list((tmp_path / "trace" / "steps").glob("part-*")))
        trace = Trace.open(tmp_path / "trace")
        assert trace.table("steps")["step"].to_pylist()[:4] == [0, 1, 2, 3]
        assert trace.manifest["finished"] is None
        assert [prompt["request"] for prompt in trace.manifest["prompts"]] == [0]


def test_a_recorded_step_has_its_other_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "PART_BYTES", 512)
    order, write = [], PartFiles.write

    def noted(self, name, table):
        order.append(name)
        write(self, name, table)

    monkeypatch.setattr(PartFiles, "write", noted)
    with ParquetObserver(tmp_path / "trace") as observer:
        observer.on(run_event(1))
        tell(observer, range(3))
    assert order[:4] == ["timings", "steps"] * 2


def on_a_full_disk(path, new_file=files.new_file):
    if path.suffix != ".parquet":
        return new_file(path)
    link = path.with_name(".full.tmp")
    link.symlink_to("/dev/full")
    return link


@pytest.mark.parametrize(("elapsed", "due"), [(0, 2), (10, 12), (50, 55), (600, 660), (7200, 7260)])
def test_parts_come_less_and_less_often(elapsed, due):
    assert next_parts(elapsed) == pytest.approx(due)


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "PART_BYTES", 512)
    folder, warnings = tmp_path / "trace", []
    with ParquetObserver(folder, warn=warnings.append) as observer:
        observer.on(run_event(1))
        tell(observer, range(3))
        # the third step is handed over when the fourth begins
        wait_for(lambda: (folder / "steps").exists() and written(folder) == [0, 1])
        monkeypatch.setattr(files, "new_file", on_a_full_disk)
        later = count(3)
        wait_for(lambda: tell(observer, [next(later)]) or warnings)
        tell(observer, islice(later, 20))
    trace = Trace.open(folder)
    assert written(folder) == [0, 1]
    assert warnings == [f"trace {folder} ends here, the run goes on: No space left on device"]
    assert trace.manifest["stopped"] == "write failed: No space left on device"
    assert trace.manifest["finished"] is not None
    assert trace.manifest["tables"]["steps"] == 2
    assert leftovers(folder) == []


def test_what_a_watch_finds_is_said_while_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "PART_BYTES", 512)
    said, later = [], count()
    with ParquetObserver(tmp_path / "trace", warn=said.append, watch=lambda folder: [folder.name]) as observer:
        observer.on(run_event(1))
        wait_for(lambda: tell(observer, [next(later)]) or said)
    assert {*said} == {"warning: trace"}


@pytest.fixture
def writer(tmp_path, monkeypatch) -> TraceWriter:
    monkeypatch.setattr(trace_writer, "PART_BYTES", 512)
    monkeypatch.setattr(trace_writer, "QUEUE_BYTES", 4096)
    (tmp_path / "trace").mkdir()
    manifest = describe_run(run_event(1), {}, positions=True, redacted=False)
    rows = TraceRows(None, positions=True, redact_text=False)
    return TraceWriter(tmp_path / "trace", rows, manifest)


def test_a_mistake_in_the_thread_is_raised_when_the_trace_is_closed(writer, tmp_path, monkeypatch):
    def mistaken(*_):
        raise ZeroDivisionError("a mistake")

    monkeypatch.setattr(PartFiles, "write", mistaken)
    writer.put([(run_event(1), {})])
    for step in range(500):  # more than the queue holds: nobody may wait for ever
        writer.put([(step_event(0, step), {})])
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        writer.close(None)
    assert Trace.open(tmp_path / "trace").manifest["finished"] is None


def test_decoding_waits_for_a_slow_disk_only_when_the_queue_is_full(tmp_path, monkeypatch):
    gate, on_selection = threading.Event(), TraceRows.on_selection

    def slow(self, event, **tensors):
        gate.wait()
        on_selection(self, event, **tensors)

    monkeypatch.setattr(TraceRows, "on_selection", slow)
    monkeypatch.setattr(trace_writer, "QUEUE_BYTES", 20_000)
    index = torch.arange(500, dtype=torch.int32)[None]
    decoded = []

    def decode() -> None:
        observer.on(run_event(1))
        for step in range(40):
            observer.on(SelectionEvent(request=0, step=step, layer=0, index_HK=index, diagnostics={}))
            tell(observer, [step])
            decoded.append(step)

    with ParquetObserver(tmp_path / "trace") as observer:
        decoder = threading.Thread(target=decode)
        decoder.start()
        wait_for(lambda: len(decoded) > 5)
        time.sleep(0.1)
        assert len(decoded) < 20  # 2,000 bytes each: ten fit
        gate.set()
        decoder.join()
    assert len(Trace.open(tmp_path / "trace").table("selections")) == 40


def record_two(folder, monkeypatch, *, lost_at: int | None = None) -> dict[int, Told]:
    """Record a run on two ranks in one process: what rank 1 sends is kept, and given to rank 0."""
    sent, received = [], []
    by_rank = {}

    def exchange(ranks: Ranks, ours):
        if ranks.number:
            sent.append(ours)
            return [(False, ours[1]), ours]
        received.append(sent.pop(0))
        if len(received) == lost_at:
            raise RankLostError("rank 0 of 2 must hear from every other, got a closed connection")
        return [ours, received[-1]]

    monkeypatch.setattr(Ranks, "apart", lambda ranks: ranks)
    monkeypatch.setattr(Ranks, "exchange", exchange)
    for rank in (1, 0):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        with ParquetObserver(folder) as observer:
            by_rank[rank] = Told(observer, 0, batch=2, steps=12, seed=3, ranks=2, rank=rank)
    return by_rank


def test_the_first_rank_writes_every_head_once_and_every_step_once(tmp_path, monkeypatch):
    by_rank = record_two(tmp_path / "run", monkeypatch)
    trace = Trace.open(tmp_path / "run")
    assert trace.ranks == 2
    assert {layer["heads"] for layer in trace.manifest["model"]["layers"]} == {2 * HEADS}
    for name in ("prompts", "steps", "logits", "verifications"):
        assert len(rows(trace, name)) == len(by_rank[0].rows[name]) > 0
    keys = ("request", "step", "layer", "head")
    for name in ("selections", "supports"):
        expected = [row | {"head": row["head"] + HEADS * rank} for rank in by_rank for row in by_rank[rank].rows[name]]
        columns = [*keys, "positions"]
        recorded = trace.table(name, columns).sort_by([(key, "ascending") for key in keys]).to_pylist()
        expected.sort(key=lambda row: [row[key] for key in keys])
        assert recorded == [{key: row[key] for key in columns} for row in expected]
    assert {row["rank"] for row in rows(trace, "timings")} == {0, 1}


def test_without_the_other_rank_the_first_one_goes_on_alone(tmp_path, monkeypatch):
    by_rank = record_two(tmp_path / "run", monkeypatch, lost_at=9)
    trace = Trace.open(tmp_path / "run")
    assert len(rows(trace, "steps")) == len(by_rank[0].rows["steps"])
    last = max(row["step"] for row in rows(trace, "supports"))
    ours = [row for row in by_rank[0].rows["supports"] if row["step"] == last]
    assert len(rows(trace, "supports", step=last)) == len(ours)
    assert len(rows(trace, "supports")) > len(by_rank[0].rows["supports"])
