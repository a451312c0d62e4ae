"""FreeKV's corrections and what was recalled for them, against plain loops over a trace's rows."""

import math
from itertools import product

import numpy as np
import pytest

from sfi_traces.model.trace import Trace
from sfi_traces.overlap import SelectedSets
from sfi_traces.summary import Scope, summarize
from sfi_traces.summary.freekv import corrections
from sfi_traces.views.raster import rasters
from sfi_traces.views.view import View
from tests.traces.made import HEADS, LAYERS, make_trace
from tests.traces.small import rows
from tests.traces.test_stability import rewrite

PLACES = [*product(range(LAYERS), range(HEADS))]
STEPS = 40


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    folder = tmp_path_factory.mktemp("corrected") / "run"
    return Trace.open(make_trace(folder, steps=STEPS, requests=2, policy="freekv"))


def bin_of(number: int) -> int:
    """Last number of its bin: 1, 2, 3-4, 5-8, ..."""
    last = 1
    while last < number:
        last *= 2
    return last


def test_corrections_are_a_share_of_fast_steps_layers_and_heads(trace):
    since = {(r["request"], r["step"]): r["steps_since_slow"] for r in rows(trace, "steps") if not r["slow"]}
    corrected = {
        (r["request"], r["step"], r["layer"], r["head"])
        for r in rows(trace, "selections")
        if r["reason"] == "correction"
    }
    could = [(*key, *place) for key in since for place in PLACES]
    found = summarize(trace)["corrections"]
    assert (found["n"], found["corrected"]) == (len(could), len(corrected))
    assert found["share"] == pytest.approx(len(corrected) / len(could))
    for one in [*found["layers"], *found["heads"]]:
        wanted = [k for k in could if k[2] == one["layer"] and k[3] == one.get("head", k[3])]
        assert (one["n"], one["corrected"]) == (len(wanted), len(corrected.intersection(wanted)))
    for one in found["since_slow"]:
        wanted = [k for k in could if bin_of(since[k[:2]]) == one["to_step"]]
        assert (one["n"], one["corrected"]) == (len(wanted), len(corrected.intersection(wanted)))
    view = corrections(Scope.of(trace, 1, 0), 1)
    wanted = [k for k in could if (k[0], *k[2:]) == (1, 0, 1)]
    assert view["share"] == pytest.approx(len(corrected.intersection(wanted)) / len(wanted))


def test_recalls_are_summed_by_step_and_layer(trace):
    found = summarize(trace, request=1)["recalls"]
    own = [row for row in rows(trace, "recalls") if row["request"] == 1]
    assert found["steps"] == STEPS - 1
    for one in [found, *found["layers"]]:
        mine = [row for row in own if row["layer"] == one.get("layer", row["layer"])]
        for name in ("rows", "bytes", "waited_us"):
            assert one[name] == pytest.approx(sum(row[name] for row in mine))
        assert one["step_bytes"] == pytest.approx(one["bytes"] / (STEPS - 1))
        assert one["step_waited_us"] == pytest.approx(one["waited_us"] / (STEPS - 1))
    assert len(found["layers"]) == LAYERS


def test_a_selection_for_the_next_step_is_in_force_then(tmp_path):
    def speculate(selections):
        one = next(row for row in selections if row["step"] == 10)
        return [one | {"step": 13, "positions": [40, 41], "reason": "speculative"}]

    folder = make_trace(tmp_path / "run", steps=20, policy="sfi")
    rewrite(folder, "selections", speculate)
    (row,) = rows(Trace.open(folder), "selections")
    view = View(Trace.open(folder))
    place = (row["layer"], row["head"])
    held = {*view.supports.of_places([place]).strongest(20).position_NUK[13:15].ravel().tolist()}
    free = next(p for p in (40, 41) if p not in held)
    cells = rasters(view, [place], most_steps=99, most_cells=999)[0].cells
    assert cells[free, 13] != cells[free, 14] != 0


def test_a_heads_selection_is_compared_with_its_own_before():
    """Heads select alone or together, more or fewer positions each time."""
    rng = np.random.default_rng(0)
    held: dict[int, set[int]] = {}
    kept = SelectedSets(3)
    for width in (4, 6, 2, 5, 3, 6):
        heads = np.flatnonzero(rng.random(3) < 0.6)
        chosen = [np.sort(rng.choice(12, rng.integers(1, width + 1), replace=False)) for _ in heads]
        index = np.array([[*one, *[-1] * (width - len(one))] for one in chosen], np.int32)
        found = kept.replace(heads, index.reshape(len(heads), width))
        for at, (head, one) in enumerate(zip(heads.tolist(), chosen, strict=True)):
            new, old = {*one.tolist()}, held.get(head)
            both = len(new & old) if old else 0
            assert (found["selected"][at], found["added"][at]) == (len(new), len(new) - both)
            assert found["removed"][at] == (len(old) - both if old else 0)
            if old is None:
                assert math.isnan(found["overlap_previous"][at])
                assert math.isnan(found["jaccard_previous"][at])
            else:
                assert found["overlap_previous"][at] == pytest.approx(both / min(len(new), len(old)))
                assert found["jaccard_previous"][at] == pytest.approx(both / len(new | old))
            held[head] = new
    assert len(held) == 3
