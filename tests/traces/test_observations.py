"""What SyncKV and FreeKV observed and recalled, from a trace's rows by plain loops over Python sets."""

import math
from collections import defaultdict
from itertools import product
from statistics import mean

import numpy as np
import pytest

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.overlap import SelectedSets
from sfi_traces.summary import summarize
from sfi_traces.summary.similarity import compare_heads, drift
from sfi_traces.summary.supports import corrections, query_cosine
from sfi_traces.views.figure_data import HeadMap
from tests.traces.made import HEADS, LAYERS, make_trace, overlap
from tests.traces.small import fixed_trace, last_of_bin, rewrite, rows, section

PLACES = [*product(range(LAYERS), range(HEADS))]
STEPS = 40
trace = fixed_trace(steps=STEPS, requests=2, policy="freekv")


def sets(trace: Trace) -> dict[tuple[int, int, int, int], list[int]]:
    names = ("request", "layer", "head", "step")
    return {tuple(r[n] for n in names): r["positions"] for r in rows(trace, "supports")}


@pytest.mark.parametrize("most", [STEPS, 7])
def test_heads_are_compared_within_and_between_layers_at_the_same_step(trace, monkeypatch, most):
    monkeypatch.setattr("sfi_traces.summary.similarity.MOST_COMPARED", most)
    held, steps = sets(trace), range(0, STEPS, math.ceil(STEPS / most))
    values: dict[tuple[int, int, int], list[float]] = defaultdict(list)
    for request, step, place, other in product(range(2), steps, PLACES, PLACES):
        if place != other:
            pair = (held[(request, *place, step)], held[(request, *other, step)])
            values[request, place[0], other[0]].append(overlap(*pair))

    def average(wanted) -> float:
        return mean(v for key, overlaps in values.items() if wanted(*key) for v in overlaps)

    similarity = section(trace, "head_similarity")
    assert (similarity["steps"], similarity["layers"]) == (2 * len(steps), [0, 1])
    for a, b in product(range(LAYERS), range(LAYERS)):
        expected = average(lambda _, layer, other, a=a, b=b: (layer, other) == (a, b))
        assert similarity["matrix"][a][b] == pytest.approx(expected, abs=1e-4)
    assert similarity["within"] == pytest.approx(average(lambda _, a, b: a == b), abs=1e-4)
    assert similarity["between"] == pytest.approx(average(lambda _, a, b: a != b), abs=1e-4)
    alone = compare_heads([Request(trace, 1).supports.thinned(most)])
    assert alone["within"] == pytest.approx(average(lambda r, a, b: r == 1 and a == b))
    assert alone["between"] == pytest.approx(average(lambda r, a, b: r == 1 and a != b))


def test_query_cosines_are_averaged_and_those_under_tau_counted(trace):
    cosine = {
        (r["request"], r["layer"], r["head"], r["step"]): r["query_cosine"]
        for r in rows(trace, "supports")
        if r["query_cosine"] is not None
    }
    summary = section(trace, "query_cosine")
    assert (summary["n"], summary["thresholds"]) == (len(cosine), [0.8, 0.9])
    assert summary["mean"] == pytest.approx(mean(cosine.values()))
    for tau, share in zip(summary["thresholds"], summary["below"], strict=True):
        assert share == sum(value < tau for value in cosine.values()) / len(cosine)
    means = {p: mean(v for key, v in cosine.items() if key[1:3] == p) for p in PLACES}
    heads = [(head["layer"], head["head"]) for head in summary["heads"]]
    assert heads == sorted(PLACES, key=means.__getitem__)
    for layer in summary["layers"]:
        values = [value for key, value in cosine.items() if key[1] == layer["layer"]]
        assert layer["mean"] == pytest.approx(mean(values))
        assert layer["below"][0] == pytest.approx(sum(value < 0.8 for value in values) / len(values))
    lowest = summary["lowest"][0]
    assert lowest["steps"] == [*range(1, STEPS)]
    expected = [mean(cosine[(r, *heads[0], step)] for r in (0, 1)) for step in range(1, STEPS)]
    assert lowest["query_cosine"] == pytest.approx(expected)
    view = query_cosine(Request.of(trace, 1, 1))
    values = [v for (r, layer, _, _), v in cosine.items() if (r, layer) == (1, 1)]
    assert (view["mean"], view["n"]) == (pytest.approx(mean(values)), len(values))
    shown = HeadMap.of({(head["layer"], head["head"]): head["mean"] for head in view["heads"]})
    assert (shown.layers, shown.heads, len(view["lowest"])) == ([1], [0, 1], 2)


def figures():
    pytest.importorskip("plotly")
    from sfi_traces.report import figures  # noqa: PLC0415 - an extra

    return figures


@pytest.mark.parametrize(
    ("read", "section", "kept", "words"),
    [
        (drift, "drift", lambda row: row["step"], "drift needs the support of step 0"),
        (drift, "drift", lambda row: not row["step"], "drift needs an audited step after step 0"),
        (
            lambda supports: compare_heads([supports]),
            "head_similarity",
            lambda row: row["layer"],
            "or more, got layer 1 alone",
        ),
        ("cosines", "query_cosine", lambda row: not row["step"], "has no query cosine of request 0"),
    ],
)
def test_what_a_view_lacks_is_one_line(tmp_path, read, section, kept, words):
    folder = make_trace(tmp_path / "run", steps=12)
    rewrite(folder, "supports", lambda supports: [*filter(kept, supports)])
    view = Request(Trace.open(folder))
    with pytest.raises(TraceError, match=words) as error:
        figures().query_cosine(view) if read == "cosines" else read(view.supports)
    assert "\n" not in str(error.value)
    summary = summarize(Trace.open(folder))
    assert summary[section] is None
    assert len([line for line in summary["missing"] if "--audit" in line]) >= 1


def test_corrections_are_a_share_of_fast_steps_layers_and_heads(trace):
    since = {(r["request"], r["step"]): r["steps_since_slow"] for r in rows(trace, "steps") if not r["slow"]}
    corrected = {
        (r["request"], r["step"], r["layer"], r["head"])
        for r in rows(trace, "selections")
        if r["reason"] == "correction"
    }
    could = [(*key, *place) for key in since for place in PLACES]
    summary = section(trace, "corrections")
    assert (summary["n"], summary["corrected"]) == (len(could), len(corrected))
    assert summary["share"] == pytest.approx(len(corrected) / len(could))
    for row in [*summary["layers"], *summary["heads"]]:
        wanted = [k for k in could if k[2] == row["layer"] and k[3] == row.get("head", k[3])]
        assert (row["n"], row["corrected"]) == (len(wanted), len(corrected.intersection(wanted)))
    for row in summary["since_slow"]:
        wanted = [k for k in could if last_of_bin(since[k[:2]]) == row["to_step"]]
        assert (row["n"], row["corrected"]) == (len(wanted), len(corrected.intersection(wanted)))
    of_layer = corrections(Request.of(trace, 1, 0))
    wanted = [k for k in could if (k[0], k[2]) == (1, 0)]
    assert of_layer["share"] == pytest.approx(len(corrected.intersection(wanted)) / len(wanted))


def test_recalls_are_summed_by_step_and_layer(trace):
    summary = section(trace, "recalls", request=1)
    recalls = [row for row in rows(trace, "recalls") if row["request"] == 1]
    assert summary["steps"] == STEPS - 1
    for part in [summary, *summary["layers"]]:
        mine = [row for row in recalls if row["layer"] == part.get("layer", row["layer"])]
        for name in ("rows", "bytes", "waited_us"):
            assert part[name] == pytest.approx(sum(row[name] for row in mine))
        assert part["step_bytes"] == pytest.approx(part["bytes"] / (STEPS - 1))
        assert part["step_waited_us"] == pytest.approx(part["waited_us"] / (STEPS - 1))
    assert len(summary["layers"]) == LAYERS


def test_a_heads_selection_is_compared_with_its_own_before():
    """Heads select alone or together, more or fewer positions each time."""
    rng = np.random.default_rng(0)
    held: dict[int, set[int]] = {}
    selected_sets = SelectedSets(3)
    for width in (4, 6, 2, 5, 3, 6):
        heads = np.flatnonzero(rng.random(3) < 0.6)
        chosen = [np.sort(rng.choice(12, rng.integers(1, width + 1), replace=False)) for _ in heads]
        index = np.array([[*positions, *[-1] * (width - len(positions))] for positions in chosen], np.int32)
        changes = selected_sets.replace(heads, index.reshape(len(heads), width))
        for at, (head, positions) in enumerate(zip(heads.tolist(), chosen, strict=True)):
            new, old = {*positions.tolist()}, held.get(head)
            both = len(new & old) if old else 0
            assert (changes["selected"][at], changes["added"][at]) == (len(new), len(new) - both)
            assert changes["removed"][at] == (len(old) - both if old else 0)
            if old is None:
                assert math.isnan(changes["overlap_previous"][at])
                assert math.isnan(changes["jaccard_previous"][at])
            else:
                assert changes["overlap_previous"][at] == pytest.approx(both / min(len(new), len(old)))
                assert changes["jaccard_previous"][at] == pytest.approx(both / len(new | old))
            held[head] = new
    assert len(held) == 3
