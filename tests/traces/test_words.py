"""Which words a step read: the passages of the prompt and of the generated text."""

import numpy as np
import pytest

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.views.words import GAP, LONG, LONGEST, Passage, step_words
from tests.traces.made import PROMPT, WORDS, make_trace
from tests.traces.small import redact, rewrite, rows

SINK, RECENT = 4, 16


def opened(folder, **options) -> Request:
    return Request(Trace.open(folder), **options)


def covered(passages: list[Passage], part: str) -> set[int]:
    return {position for one in passages if one.part == part for position in range(one.first, one.last + 1)}


def test_a_fast_step_read_the_sink_what_was_selected_last_and_the_recent_tokens(tmp_path):
    """Eq. 1, by the trace's own rows."""
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"), layer=1, head=0)
    found = step_words(view, 17)
    (selection,) = rows(view.trace, "selections", step=10, layer=1, head=0)
    recent = PROMPT + 10 - RECENT  # anchored where the slow step left it
    chosen = {p for p in selection["positions"] if SINK <= p < recent}
    assert sum(one.tokens for one in found.passages if one.part == "selected") == len(chosen)
    between = covered(found.passages, "selected") - chosen
    assert chosen <= covered(found.passages, "selected")
    assert all(min(abs(p - q) for q in chosen) <= GAP for p in between)
    assert covered(found.passages, "sink") == set(range(SINK))
    assert covered(found.passages, "recent") == set(range(recent, PROMPT + 17))
    assert (found.slow, found.refreshed, found.places) == (False, [10], [(1, 0)])


def test_what_was_read_and_what_was_missed_share_out_the_recorded_mass(tmp_path):
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"))
    found = step_words(view, 17)
    supports = rows(view.trace, "supports", step=17)
    masses = [sum(one.mass or 0 for one in each) for each in (found.passages, found.missed)]
    assert sum(masses) == pytest.approx(np.mean([sum(row["mass"]) for row in supports]), rel=1e-5)
    assert min(masses) > 0
    assert [one.mass for one in found.missed] == sorted((one.mass for one in found.missed), reverse=True)


def test_what_the_audit_saw_read_counts_where_the_trace_has_it(tmp_path):
    """Heads of one step may differ in ways that selections do not say."""
    view = opened(make_trace(tmp_path / "t", steps=40, policy="sfi"))
    rewrite(
        view.trace.path,
        "supports",
        lambda all_rows: [row | {"read": [True] * len(row["positions"])} for row in all_rows],
    )
    assert step_words(view, 17).missed == []


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
    found = [one for one in step_words(view, 35).passages if one.part == "selected"]
    edges = sorted((one.first, one.last) for one in found)
    assert edges == [(20, stop), (stop + 1, stop + LONGEST), (stop + LONGEST + 1, 119)]
    first = min(found, key=lambda one: one.first)
    assert first.text == "".join(f" {WORDS[p % 10]}" for p in range(20, stop)) + "."
    assert first.places == [(0, 0)]


def test_what_a_trace_lacks_is_said_in_one_line(tmp_path):
    folder = make_trace(tmp_path / "t", steps=20, policy="sfi")
    with pytest.raises(ConfigError, match="step must be in 0 to 19 of request 0, got 20"):
        step_words(opened(folder), 20)
    rewrite(folder, "selections", lambda every: [row | {"positions": None} for row in every])
    with pytest.raises(TraceError, match=r"no positions of its selections; record it with --set trace"):
        step_words(opened(folder), 15)
    rewrite(folder, "selections", lambda _: [])
    (note,) = step_words(opened(folder), 15).notes
    assert note == "policy sfi had selected nothing; a fast step read the sink and the recent tokens"
    with pytest.raises(TraceError, match="has no text: it was redacted"):
        step_words(opened(redact(folder)), 15)
