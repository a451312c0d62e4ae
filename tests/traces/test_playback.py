"""A recorded run step by step, and which words a step read."""

from operator import itemgetter

import numpy as np
import pytest
from pyarrow import parquet

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model import rows as row_groups
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.views import frames
from sfi_traces.views.frames import playable
from sfi_traces.views.words import GAP, LONG, LONGEST, step_words
from tests.traces.made import PROMPT, WORDS, make_trace
from tests.traces.small import fixed_trace, redact, rewrite, rows, write_part, write_trace

WIDTH = 50
trace = fixed_trace(policy="sfi", requests=2, seed=4)


@pytest.fixture(scope="module")
def run(trace) -> Request:
    return playable(trace, request=1)


def test_a_frame_is_its_row(trace, run):
    assert len(run.steps) == 60
    assert run.steps.slow_at == [0, 10, 20, 30, 40, 50]
    for step in (0, 7, 10, 59):
        assert [frames.frame(run, step)["row"]] == rows(trace, "steps", request=1, step=step)


def test_measures_are_means_over_layers_and_heads(trace, run):
    supports = rows(trace, "supports", request=1, step=13)
    measures = frames.frame(run, 13)["measures"]
    for name in ("retained_mass", "overlap_previous_step", "overlap_last_refresh"):
        assert measures[name] == pytest.approx(np.mean([row[name] for row in supports]))
    assert measures["lambda_star"] is None
    refresh = rows(trace, "selections", request=1, step=20)
    assert frames.frame(run, 20)["measures"]["lambda_star"] == pytest.approx(
        np.mean([r["lambda_star"] for r in refresh])
    )
    assert frames.frame(run, 0)["measures"]["overlap_previous_step"] is None


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
        assert strip["mass"] == pytest.approx(masses(trace, step, length), abs=1e-6)
        refresh = step - step % 10
        start = PROMPT + refresh - 16
        last = (step - 1) // 10 * 10  # a slow step's selection serves the steps after it
        selected = {p for row in rows(trace, "selections", request=1, step=last) for p in row["positions"]}
        for name, positions in (("sink", range(4)), ("recent", range(start, length)), ("selected", selected)):
            assert np.flatnonzero(strip[name]).tolist() == sorted({p * WIDTH // length for p in positions})


def test_steps_without_an_audit_have_an_empty_strip(tmp_path):
    run = playable(Trace.open(make_trace(tmp_path / "t", policy="sfi", audit=4)))
    assert not frames.strip(run, 5, WIDTH)["mass"].any()
    assert frames.frame(run, 5)["measures"]["retained_mass"] is None
    assert frames.strip(run, 8, WIDTH)["mass"].any()


def test_the_passages_are_those_of_show(trace, run):
    """Also at a slow step, which reads everything, and not only what it then selects."""
    for step, least in ((23, 5), (20, 20)):
        shown = step_words(Request(trace, index=1), step)["passages"]
        assert len(shown) > least
        passages = frames.passages(run, step, most=1000)
        key = itemgetter("first")
        assert sorted((passage.to_dict() for passage in passages), key=key) == sorted(shown, key=key)
    assert {passage.part for passage in passages} == {"all"}
    few = frames.passages(run, 23, most=3)
    assert [passage.part for passage in few] == ["sink", *["selected"] * 3, "recent"]
    assert [passage.mass for passage in few[1:4]] == sorted((passage.mass for passage in few[1:4]), reverse=True)


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
    selections = [
        {place[1]: positions.tolist() for place, positions in run.in_force(step).items()} for step in range(7)
    ]
    assert selections == [
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
    reader = row_groups.Rows(Trace.open(folder), "supports", 0, ["positions"])
    path.write_bytes(b"")
    assert reader.last(14) == 14
    assert reader.at(14)["positions"].to_pylist() == [row["positions"] for row in table if row["step"] == 14]
    assert reader.last(-1) is None
    with pytest.raises(TraceError, match="has a damaged part"):
        reader.at(25)


def test_the_row_groups_of_neighbouring_steps_stay_in_memory(tmp_path, monkeypatch):
    """Two parts of ten steps: back and forth over their edge reads each only once."""
    folder = make_trace(tmp_path / "run", steps=20, policy="sfi")
    table = parquet.read_table(folder / "supports").to_pylist()
    for number in range(2):
        write_part(folder, "supports", [row for row in table if row["step"] // 10 == number], number)
    reader = row_groups.Rows(Trace.open(folder), "supports", 0, ["positions"])
    read, true = [], row_groups.checked
    monkeypatch.setattr(row_groups, "checked", lambda *given: read.append(given) or true(*given))
    assert [len(reader.at(step)) for step in (9, 10)] == [4, 4]
    assert len(read) == 4  # keys and values
    assert [len(reader.at(step)) for step in (9, 10, 9)] == [4, 4, 4]
    assert len(read) == 4


SINK, RECENT = 4, 16


def opened(folder, **options) -> Request:
    return Request(Trace.open(folder), **options)


def covered(passages: list[dict], part: str) -> set[int]:
    return {
        position
        for passage in passages
        if passage["part"] == part
        for position in range(passage["first"], passage["last"] + 1)
    }


def test_a_fast_step_read_the_sink_what_was_selected_last_and_the_recent_tokens(tmp_path):
    """Eq. 1, by the trace's own rows."""
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"), layer=1, head=0)
    words = step_words(view, 17)
    (selection,) = rows(view.trace, "selections", step=10, layer=1, head=0)
    recent = PROMPT + 10 - RECENT  # anchored where the slow step left it
    chosen = {p for p in selection["positions"] if SINK <= p < recent}
    assert sum(passage["tokens"] for passage in words["passages"] if passage["part"] == "selected") == len(chosen)
    between = covered(words["passages"], "selected") - chosen
    assert chosen <= covered(words["passages"], "selected")
    assert all(min(abs(p - q) for q in chosen) <= GAP for p in between)
    assert covered(words["passages"], "sink") == set(range(SINK))
    assert covered(words["passages"], "recent") == set(range(recent, PROMPT + 17))
    assert (words["slow"], words["refreshed"], words["places"]) == (False, [10], [{"layer": 1, "heads": [0]}])


def test_what_was_read_and_what_was_missed_share_out_the_recorded_mass(tmp_path):
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"))
    words = step_words(view, 17)
    supports = rows(view.trace, "supports", step=17)
    masses = [sum(passage["mass"] or 0 for passage in words[name]) for name in ("passages", "missed")]
    assert sum(masses) == pytest.approx(np.mean([sum(row["mass"]) for row in supports]), rel=1e-5)
    assert min(masses) > 0
    missed = [passage["mass"] for passage in words["missed"]]
    assert missed == sorted(missed, reverse=True)


def test_what_the_audit_saw_read_counts_where_the_trace_has_it(tmp_path):
    """Heads of one step may differ in ways that selections do not say."""
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"))
    rewrite(
        view.trace.path,
        "supports",
        lambda all_rows: [row | {"read": [True] * len(row["positions"])} for row in all_rows],
    )
    assert step_words(view, 17)["missed"] == []


def test_a_passage_has_its_text_and_ends_with_a_sentence_once_it_is_long(tmp_path):
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"))
    (selection, *_) = rows(view.trace, "selections", step=30, layer=0, head=0)
    whole = {**selection, "positions": list(range(20, 120))}
    rewrite(view.trace.path, "selections", lambda _: [whole])
    stop = 20 + LONG + 6
    rewrite(
        view.trace.path,
        "prompts",
        lambda all_rows: [row | ({"token_text": "."} if row["position"] == stop else {}) for row in all_rows],
    )
    passages = [passage for passage in step_words(view, 35)["passages"] if passage["part"] == "selected"]
    edges = sorted((passage["first"], passage["last"]) for passage in passages)
    assert edges == [(20, stop), (stop + 1, stop + LONGEST), (stop + LONGEST + 1, 119)]
    first = min(passages, key=itemgetter("first"))
    assert first["text"] == "".join(f" {WORDS[p % 10]}" for p in range(20, stop)) + "."
    assert first["places"] == [{"layer": 0, "heads": [0]}]


def test_what_a_trace_lacks_is_said_in_one_line(tmp_path):
    folder = make_trace(tmp_path / "t", steps=20, policy="sfi")
    with pytest.raises(ConfigError, match="step must be in 0 to 19 of request 0, got 20"):
        step_words(opened(folder), 20)
    rewrite(folder, "selections", lambda every: [row | {"positions": None} for row in every])
    with pytest.raises(TraceError, match=r"no positions of its selections; record it with --set trace"):
        step_words(opened(folder), 15)
    rewrite(folder, "selections", lambda _: [])
    (note,) = step_words(opened(folder), 15)["notes"]
    assert note == "policy sfi had selected nothing; a fast step read the sink and the recent tokens"
    with pytest.raises(TraceError, match="has no text: it was redacted"):
        step_words(opened(redact(folder)), 15)
