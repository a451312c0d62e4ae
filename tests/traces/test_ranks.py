"""What the first of several ranks records of the others."""

from sfi_core.distributed.ranks import Ranks
from sfi_core.errors import RankLostError
from sfi_traces import ParquetObserver, Trace
from tests.traces.small import rows
from tests.traces.told import HEADS, Told


def record_two(folder, monkeypatch, *, lost_at: int | None = None) -> dict[int, Told]:
    """Record a run on two ranks in one process: what rank 1 sends is kept, and given to rank 0."""
    sent, received = [], []
    told = {}

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
            told[rank] = Told(observer, 0, batch=2, steps=12, seed=3, ranks=2, rank=rank)
    return told


def test_the_first_rank_writes_every_head_once_and_every_step_once(tmp_path, monkeypatch):
    told = record_two(tmp_path / "run", monkeypatch)
    trace = Trace.open(tmp_path / "run")
    assert trace.ranks == 2
    assert {layer["heads"] for layer in trace.manifest["model"]["layers"]} == {2 * HEADS}
    for name in ("prompts", "steps", "logits", "verifications"):
        assert len(rows(trace, name)) == len(told[0].rows[name]) > 0
    keys = ("request", "step", "layer", "head")
    for name in ("selections", "supports"):
        expected = [row | {"head": row["head"] + HEADS * rank} for rank in told for row in told[rank].rows[name]]
        columns = [*keys, "positions"]
        found = trace.table(name, columns).sort_by([(key, "ascending") for key in keys]).to_pylist()
        expected.sort(key=lambda row: [row[key] for key in keys])
        assert found == [{key: row[key] for key in columns} for row in expected]
    assert {row["rank"] for row in rows(trace, "timings")} == {0, 1}


def test_without_the_other_rank_the_first_one_goes_on_alone(tmp_path, monkeypatch):
    told = record_two(tmp_path / "run", monkeypatch, lost_at=9)
    trace = Trace.open(tmp_path / "run")
    assert len(rows(trace, "steps")) == len(told[0].rows["steps"])
    last = max(row["step"] for row in rows(trace, "supports"))
    ours = [row for row in told[0].rows["supports"] if row["step"] == last]
    assert len(rows(trace, "supports", step=last)) == len(ours)
    assert len(rows(trace, "supports")) > len(told[0].rows["supports"])
