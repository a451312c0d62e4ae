"""A trace's supports as top-k sets of KV heads."""

from pathlib import Path

import pytest

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.trace import Trace
from sfi_traces.tune.head_supports import largest_top, request_supports, requests_of
from tests.traces.made import HEADS, LAYERS, MODEL, TOP, make_trace
from tests.traces.small import change_manifest, write_trace

AUDIT = {"every": 1, "top": TOP, "layers": None, "heads": None}


def recorded(folder: Path, **options) -> Trace:
    return Trace.open(make_trace(folder / "trace", **options))


def test_sets_are_the_most_probable_positions_by_head_and_step(tmp_path):
    trace, top = recorded(tmp_path, steps=5, requests=2), 4
    found = dict(request_supports(trace, 1, top))
    assert sorted(found) == list(range(LAYERS))
    rows = [row for row in trace.table("supports").to_pylist() if row["request"] == 1]
    assert len(rows) == 5 * LAYERS * HEADS
    for row in rows:
        pairs = sorted(zip(row["mass"], row["positions"], strict=True), key=lambda p: (-p[0], p[1]))
        chosen = found[row["layer"]][row["step"], row["head"]].tolist()
        assert chosen == sorted(position for _, position in pairs[:top])


def test_steps_with_no_more_than_k_tokens_are_left_out(tmp_path):
    steps = [{"request": 0, "step": s, "context_tokens": 3 + s, "slow": True} for s in range(3)]
    supports = [
        {"request": 0, "step": s, "layer": la, "head": h, "positions": [0, s + 1], "mass": [0.6, 0.4]}
        for s in range(3) for la in range(LAYERS) for h in range(HEADS)
    ]  # fmt: skip
    trace = Trace.open(write_trace(tmp_path / "t", {"steps": steps, "supports": supports}))
    assert [len(sets) for _, sets in request_supports(trace, 0, 4)] == [1] * LAYERS
    assert dict(request_supports(trace, 0, 4))[0][0, 0].tolist() == [0, 3, -1, -1]
    with pytest.raises(TraceError, match="must have steps with more than 9 tokens"):
        list(request_supports(trace, 0, 9))


def test_a_larger_k_than_the_audit_s_is_refused(tmp_path):
    trace = recorded(tmp_path, steps=2)
    assert largest_top([trace]) == TOP
    assert requests_of(trace) == [0]
    with pytest.raises(ConfigError, match=f"top_k must be at most audit.top .*, {TOP}, got 99"):
        list(request_supports(trace, 0, 99))


def test_a_partial_audit_is_refused(tmp_path):
    folder = make_trace(tmp_path / "trace", steps=2)
    trace = Trace.open(change_manifest(folder, audit=AUDIT | {"layers": [0]}))
    with pytest.raises(TraceError, match=r"must audit all layers, got \[0\]"):
        largest_top([trace])


def test_traces_of_two_models_are_refused(tmp_path):
    first = recorded(tmp_path, steps=2)
    folder = make_trace(tmp_path / "other", steps=2)
    other = Trace.open(change_manifest(folder, model=MODEL | {"name": "another"}))
    with pytest.raises(TraceError, match="traces must be of one model"):
        largest_top([first, other])
