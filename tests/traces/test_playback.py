"""A recorded run step by step."""

from operator import attrgetter

import numpy as np
import pytest
from pyarrow import parquet

from sfi_core.errors import TraceError
from sfi_traces.model import rows as row_groups
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.views import frames
from sfi_traces.views.frames import playable
from sfi_traces.views.words import step_words
from tests.traces.made import PROMPT, make_trace
from tests.traces.small import fixed_trace, rows, write_part, write_trace

WIDTH = 50
trace = fixed_trace(policy="sfi", requests=2, seed=4)


@pytest.fixture(scope="module")
def run(trace) -> Request:
    return playable(trace, request=1)


def test_a_frame_is_its_row(trace, run):
    assert len(run.steps) == 60
    assert run.steps.slow_at == [0, 10, 20, 30, 40, 50]
    for step in (0, 7, 10, 59):
        assert [frames.frame(run, step).row] == rows(trace, "steps", request=1, step=step)


def test_measures_are_means_over_layers_and_heads(trace, run):
    found = rows(trace, "supports", request=1, step=13)
    frame = frames.frame(run, 13)
    for name in ("retained_mass", "overlap_previous_step", "overlap_last_refresh"):
        assert frame.measures[name] == pytest.approx(np.mean([row[name] for row in found]))
    assert frame.lambda_star is None
    refresh = rows(trace, "selections", request=1, step=20)
    assert frames.frame(run, 20).lambda_star == pytest.approx(np.mean([r["lambda_star"] for r in refresh]))
    assert frames.frame(run, 0).measures["overlap_previous_step"] is None


def masses(trace: Trace, step: int, length: int) -> np.ndarray:
    bins = np.zeros(WIDTH)
    for row in rows(trace, "supports", request=1, step=step):
        for position, mass in zip(row["positions"], row["mass"], strict=True):
            bins[position * WIDTH // length] += mass / 4
    return bins


def test_a_strip_bins_the_mass_and_marks_the_memory(trace, run):
    for step in (0, 11, 20):
        length = PROMPT + step
        strip = frames.strip(run, step, WIDTH)
        now = masses(trace, step, length)
        before = masses(trace, step - 1, length) if step else now
        even = 1 / WIDTH
        assert strip.mass == pytest.approx(now, abs=1e-6)
        assert strip.added.tolist() == ((now > even) & (before <= even)).tolist()
        assert strip.removed.tolist() == ((now <= even) & (before > even)).tolist()
        refresh = step - step % 10
        start = PROMPT + refresh - 16
        last = (step - 1) // 10 * 10  # a slow step's selection serves the steps after it
        selected = {p for row in rows(trace, "selections", request=1, step=last) for p in row["positions"]}
        for marks, positions in (
            (strip.sink, range(4)), (strip.recent, range(start, length)), (strip.selected, selected),
        ):  # fmt: skip
            assert np.flatnonzero(marks).tolist() == sorted({p * WIDTH // length for p in positions})
    assert strip.added.any() or strip.removed.any()


def test_steps_without_an_audit_have_an_empty_strip(tmp_path):
    run = playable(Trace.open(make_trace(tmp_path / "t", policy="sfi", audit=4)))
    assert [frames.is_audited(run, step) for step in (4, 5, 6, 7, 8)] == [True, *[False] * 3, True]
    strip = frames.strip(run, 5, WIDTH)
    assert not strip.mass.any()
    assert not strip.removed.any()
    assert frames.frame(run, 5).measures["retained_mass"] is None
    assert frames.strip(run, 8, WIDTH).added.any()


def test_the_passages_are_those_of_show(trace, run):
    """Also at a slow step, which reads everything, and not only what it then selects."""
    for step, least in ((23, 5), (20, 20)):
        shown = step_words(Request(trace, index=1), step).passages
        assert len(shown) > least
        found = frames.passages(run, step, most=1000)
        key = attrgetter("first")
        assert sorted(found, key=key) == sorted(shown, key=key)
    assert {one.part for one in found} == {"all"}
    few = frames.passages(run, 23, most=3)
    assert [one.part for one in few] == ["sink", *["selected"] * 3, "recent"]
    assert [one.mass for one in few[1:4]] == sorted((one.mass for one in few[1:4]), reverse=True)


def test_the_selection_in_force_is_each_head_s_last(tmp_path):
    """A slow step's serves the steps after it; one made ahead serves the next step."""

    def row(step: int, head: int, positions: list[int], reason: str = "") -> dict:
        key = {"request": 0, "step": step, "layer": 0, "head": head}
        return key | {"positions": positions, "reason": reason}

    chosen = [
        row(0, 0, [1]), row(0, 1, [2]), row(2, 1, [3], "correction"), row(3, 0, [4], "speculative"),
        row(5, 0, [5]), row(5, 1, [6]),
    ]  # fmt: skip
    steps = [{"request": 0, "step": t, "slow": t in (0, 5), "context_tokens": 100 + t} for t in range(7)]
    trace = Trace.open(write_trace(tmp_path / "t", {"steps": steps, "selections": chosen}))
    run = playable(trace)
    found = [{place[1]: positions.tolist() for place, positions in run.in_force(step).items()} for step in range(7)]
    assert found == [
        {}, {0: [1], 1: [2]}, {0: [1], 1: [3]}, {0: [1], 1: [3]}, {0: [4], 1: [3]}, {0: [4], 1: [3]},
        {0: [5], 1: [6]},
    ]  # fmt: skip


def test_only_the_parts_that_may_hold_a_step_are_read(tmp_path):
    """Three parts of ten steps: what is not asked for may even be damaged."""
    folder = make_trace(tmp_path / "t", steps=30)
    table = Trace.open(folder).table("supports").to_pylist()
    for number in range(3):
        part = [row for row in table if row["step"] // 10 == number]
        path = write_part(folder, "supports", part, number)
    found = row_groups.Rows(Trace.open(folder), "supports", 0, ["positions"])
    path.write_bytes(b"")
    assert found.last(14) == 14
    assert found.at(14)["positions"].to_pylist() == [row["positions"] for row in table if row["step"] == 14]
    assert found.last(-1) is None
    with pytest.raises(TraceError, match="cannot be read"):
        found.at(25)


def test_the_row_groups_of_neighbouring_steps_stay_in_memory(tmp_path, monkeypatch):
    """Two parts of ten steps: back and forth over their edge reads each only once."""
    folder = make_trace(tmp_path / "run", steps=20, policy="sfi")
    table = parquet.read_table(folder / "supports").to_pylist()
    for number in range(2):
        write_part(folder, "supports", [row for row in table if row["step"] // 10 == number], number)
    found = row_groups.Rows(Trace.open(folder), "supports", 0, ["positions"])
    read, true = [], row_groups.checked
    monkeypatch.setattr(row_groups, "checked", lambda *given: read.append(given) or true(*given))
    assert [len(found.at(step)) for step in (9, 10)] == [4, 4]
    assert len(read) == 4  # keys and values
    assert [len(found.at(step)) for step in (9, 10, 9)] == [4, 4, 4]
    assert len(read) == 4
