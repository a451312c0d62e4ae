"""Traces of a run's ranks in one folder: joined, and told apart from what does not belong together."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sfi_cli.app import app
from sfi_core.errors import TraceError
from sfi_traces import ParquetObserver, Trace
from sfi_traces.read.check import check
from sfi_traces.schema import MANIFEST
from tests.traces.small import change_manifest, make_ranks, rewrite, rows, section, write_part
from tests.traces.told import HEADS, Told

RUN = {"ranks": 2, "run_id": "5" * 32, "began_unix_ns": 1_700_000_000_123_456_789}


def record(folder: Path, monkeypatch, **changes) -> dict[int, Told]:
    """Record a run as its two ranks do, one after the other."""
    told = {}
    for rank in (0, 1):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        with ParquetObserver(folder, **changes) as observer:
            told[rank] = Told(observer, 0, batch=2, steps=12, seed=3, **RUN, rank=rank)
    return told


def test_the_joined_tables_have_every_head_once_and_every_step_once(tmp_path, monkeypatch):
    told = record(tmp_path / "run", monkeypatch)
    trace = Trace.open(tmp_path / "run")
    assert (trace.ranks, [*trace.by_rank]) == (2, [0, 1])
    for name in ("prompts", "steps", "logits", "verifications"):
        assert len(rows(trace, name)) == len(told[0].rows[name]) > 0
    for name in ("selections", "supports"):
        expected = [row | {"head": row["head"] + HEADS * rank} for rank, one in told.items() for row in one.rows[name]]
        keys = ("request", "step", "layer", "head")
        expected.sort(key=lambda row: [row[key] for key in keys])
        found = trace.table(name, [*keys, "positions"]).to_pylist()
        assert found == [{key: row[key] for key in (*keys, "positions")} for row in expected]
    assert trace.table("timings")["rank"].value_counts().to_pylist() == [
        {"values": rank, "counts": len(rows(one, "timings"))} for rank, one in trace.by_rank.items()
    ]


def test_every_rank_says_whose_run_and_which_heads_it_has(tmp_path, monkeypatch):
    record(tmp_path / "run", monkeypatch)
    for rank, path in enumerate((tmp_path / "run", tmp_path / "run" / "rank-00001")):
        manifest = json.loads((path / MANIFEST).read_text())
        assert {name: manifest[name] for name in (*RUN, "rank")} == RUN | {"rank": rank}
        assert {layer["heads"] for layer in manifest["model"]["layers"]} == {HEADS}
    whole = Trace.open(tmp_path / "run").manifest["model"]
    assert {layer["heads"] for layer in whole["layers"]} == {2 * HEADS}
    assert whole["query_heads"] == 2 * manifest["model"]["query_heads"]


def test_a_run_of_one_process_clears_away_the_ranks_of_the_one_before(tmp_path, monkeypatch):
    record(tmp_path / "run", monkeypatch)
    record(tmp_path / "run", monkeypatch, force=True)
    assert Trace.open(tmp_path / "run").by_rank.keys() == {0, 1}
    monkeypatch.delenv("WORLD_SIZE")
    with ParquetObserver(tmp_path / "run", force=True) as observer:
        Told(observer, 0, batch=2, steps=4, seed=3)
    assert Trace.open(tmp_path / "run").by_rank.keys() == {0}
    assert not (tmp_path / "run" / "rank-00001").exists()


def test_ranks_of_different_runs_are_one_line(tmp_path):
    folder = make_ranks(tmp_path / "run", steps=20)
    change_manifest(folder / "rank-00001", run_id="6" * 32, created="2026-11-22T10:00:00+00:00")
    wanted = (
        f"trace {folder} must have ranks of one run, got rank 1 of the run of 2026-11-22T10:00:00+00:00 "
        "beside rank 0 of that of 2026-11-21T10:00:00+00:00"
    )
    with pytest.raises(TraceError, match=f"^{re.escape(wanted)}$"):
        Trace.open(folder)
    done = CliRunner().invoke(app, ["trace", "show", str(folder)])
    assert isinstance(done.exception, TraceError)


def test_a_rank_that_is_not_there_is_named_and_the_rest_is_read(tmp_path):
    folder = make_ranks(tmp_path / "run", steps=20)
    shutil.rmtree(folder / "rank-00001")
    found = check(Trace.open(folder))
    assert found["sound"]
    assert found["notes"] == [
        "rank 1 of 2 has no trace here: selections, supports and timings of its KV heads are missing"
    ]
    assert section(Trace.open(folder), "ranks")["missing"] == [1]
    shown = CliRunner().invoke(app, ["trace", "show", str(folder), "--full"])
    assert "Ranks: 1 of 2, without 1" in shown.output


def test_a_killed_rank_is_read_as_far_as_it_came(tmp_path):
    folder = make_ranks(tmp_path / "run", steps=20)
    change_manifest(folder / "rank-00001", finished=None)
    rewrite(folder / "rank-00001", "steps", lambda rows: rows[:15])
    found = check(Trace.open(folder))
    assert found["sound"]
    assert found["notes"] == [
        "rank 1 not finished: it was killed, or goes on",
        "rank 1 lacks 5 steps, from step 15 of request 0 on",
    ]
    (folder / "rank-00001" / MANIFEST).unlink()  # it had not even begun
    assert Trace.open(folder).by_rank.keys() == {0}


def test_ranks_that_disagree_about_a_step_are_not_sound(tmp_path):
    folder = make_ranks(tmp_path / "run", steps=20)
    assert check(Trace.open(folder))["problems"] == []

    def otherwise(rows: list[dict]) -> list[dict]:
        return [row | {"token_id": 7} if row["step"] == 4 else row for row in rows]

    rewrite(folder / "rank-00001", "steps", otherwise)
    assert check(Trace.open(folder))["problems"] == [
        "request 0, step 4: token_id must be 4 on every rank, got 7 on rank 1"
    ]


def test_a_finished_rank_with_fewer_steps_or_a_damaged_part_is_not_sound(tmp_path):
    folder = make_ranks(tmp_path / "run", steps=20)
    rewrite(folder / "rank-00001", "steps", lambda rows: rows[:15])
    write_part(folder / "rank-00001", "logits", [], number=2)
    problems = check(Trace.open(folder))["problems"]
    assert "rank 1 must have the 20 steps of rank 0, got 15" in problems
    assert "rank-00001/logits/part-00001.parquet is missing" in problems
