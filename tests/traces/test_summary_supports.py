"""Overlaps, retained mass and lambda* of `sfi trace show`, against plain loops over the rows."""

from collections import defaultdict

import numpy as np
import pytest

from sfi_traces.model.trace import Trace
from sfi_traces.summary import summarize
from tests.traces.made import CONFIG, LAYERS, STOP, TOP, make_trace, overlap
from tests.traces.small import assert_spread, rows


@pytest.fixture(scope="module")
def sparse(tmp_path_factory) -> Trace:
    folder = tmp_path_factory.mktemp("sparse") / "run"
    return Trace.open(make_trace(folder, steps=50, requests=2, policy="sfi", sentence=9))


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Trace:
    return Trace.open(make_trace(tmp_path_factory.mktemp("dense") / "run", steps=40, requests=2, sentence=7))


def steps_by_key(trace: Trace) -> dict[tuple[int, int], dict]:
    return {(row["request"], row["step"]): row for row in rows(trace, "steps")}


def positions_by_place(trace: Trace) -> dict[tuple[int, int, int], dict[int, list[int]]]:
    """Positions by request, layer and head, then by step."""
    found: dict = defaultdict(dict)
    for row in rows(trace, "supports"):
        found[row["request"], row["layer"], row["head"]][row["step"]] = row["positions"]
    return found


@pytest.mark.parametrize("name", ["sparse", "dense"])
def test_overlap_within_sentences_and_across_boundaries(name, request):
    """Recomputed from the positions: a pair is across if its steps are of different sentences."""
    trace = request.getfixturevalue(name)
    steps = steps_by_key(trace)
    pairs: dict[tuple, list[float]] = defaultdict(list)
    for (number, layer, _), lists in positions_by_place(trace).items():
        for step in range(1, len(lists)):
            across = steps[number, step]["sentence"] != steps[number, step - 1]["sentence"]
            value = overlap(lists[step - 1], lists[step])
            pairs[layer, across].append(value)
            pairs["all", across].append(value)
    found = summarize(trace)["stability"]
    assert_spread(found["within"], pairs["all", False])
    assert_spread(found["across"], pairs["all", True])
    held = [TOP / steps[key]["context_tokens"] for key in steps if key[1]]
    assert found["chance"] == pytest.approx(np.mean(held))
    assert [one["layer"] for one in found["layers"]] == list(range(LAYERS))
    for one in found["layers"]:
        assert_spread(one["within"], pairs[one["layer"], False])
        assert_spread(one["across"], pairs[one["layer"], True])


def bin_of(lag: int) -> int:
    """First lag of the bin: 1, 2, 3-4, 5-8, 9-16, ..."""
    last = 1
    while last < lag:
        last *= 2
    return lag if lag <= 2 else last // 2 + 1


def assert_lags(found: dict, trace: Trace, refreshes: dict[int, set[int]]) -> None:
    expected: dict[tuple[int, str], list[float]] = defaultdict(list)
    for (number, _, _), lists in positions_by_place(trace).items():
        for step in range(1, len(lists)):
            last = max(at for at in refreshes[number] if at < step)
            kind = "refresh" if step in refreshes[number] else "reuse"
            expected[bin_of(step - last), kind].append(overlap(lists[last], lists[step]))
    seen = set()
    for lag in found["lags"]:
        assert lag["to_lag"] == (lag["from_lag"] if lag["from_lag"] <= 2 else 2 * lag["from_lag"] - 2)
        for kind in ("reuse", "refresh"):
            if lag[kind] is not None:
                seen.add((lag["from_lag"], kind))
                assert_spread(lag[kind], expected[lag["from_lag"], kind])
    assert seen == set(expected)


def test_overlap_by_lag_since_the_last_slow_step(sparse):
    slow = defaultdict(set)
    for (number, step), row in steps_by_key(sparse).items():
        if row["slow"]:
            slow[number].add(step)
    found = summarize(sparse)["lags"]
    assert found["refreshes"] == "recorded"
    assert_lags(found, sparse, slow)


@pytest.mark.parametrize("delay", [0, 2])
def test_without_fast_steps_the_lag_counts_from_where_eq_5_would_refresh(tmp_path, delay):
    config = CONFIG | {"trigger_delay": delay}
    trace = Trace.open(make_trace(tmp_path / "run", steps=40, requests=2, sentence=7, config=config))
    due = defaultdict(lambda: {0})
    for (number, step), row in steps_by_key(trace).items():
        if row["token_id"] == STOP:
            due[number].add(step + 1 + delay)
    found = summarize(trace)["lags"]
    assert found["refreshes"] == "boundaries"
    assert_lags(found, trace, due)


def test_retained_mass_counts_fast_steps_only_and_the_worst_head_comes_first(sparse):
    steps = steps_by_key(sparse)
    by_head, by_layer = defaultdict(list), defaultdict(list)
    for row in rows(sparse, "supports"):
        if not steps[row["request"], row["step"]]["slow"]:
            by_head[row["layer"], row["head"]].append(row["retained_mass"])
            by_layer[row["layer"]].append(row)
    found = summarize(sparse)["audit"]
    assert_spread(found["retained_mass"], [v for values in by_head.values() for v in values])
    assert_spread(found["output_error"], [r["output_error"] for v in by_layer.values() for r in v])
    for one in found["layers"]:
        assert_spread(one["retained_mass"], [r["retained_mass"] for r in by_layer[one["layer"]]])
    means = {place: np.mean(values) for place, values in by_head.items()}
    assert [(h["layer"], h["head"]) for h in found["heads"]] == sorted(means, key=means.__getitem__)
    for head in found["heads"]:
        assert_spread(head["retained_mass"], by_head[head["layer"], head["head"]])


def test_query_cosine_counts_all_steps_that_have_one(sparse):
    values = [row["query_cosine"] for row in rows(sparse, "supports") if row["query_cosine"] is not None]
    assert_spread(summarize(sparse)["audit"]["query_cosine"], values)


def test_next_token_divergence_and_agreement(sparse):
    found, logits = summarize(sparse)["logits"], rows(sparse, "logits")
    assert_spread(found["kl_next_token"], [row["kl_next_token"] for row in logits])
    assert found["argmax_agreement"] == pytest.approx(sum(r["argmax_agrees"] for r in logits) / len(logits))


def test_selections_and_how_often_lambda_is_clipped(sparse):
    found, selections = summarize(sparse)["selections"], rows(sparse, "selections")
    assert found["rows"] == len(selections)
    assert_spread(found["lambda_star"], [row["lambda_star"] for row in selections])
    for name in ("overlap_previous", "jaccard_previous"):
        assert_spread(found[name], [row[name] for row in selections if row[name] is not None])
    clipped = sum(abs(row["lambda_star"] - 0.02) < 1e-6 for row in selections)
    assert 0 < clipped < len(selections)
    assert found["clipped_share"] == pytest.approx(clipped / len(selections))
