"""How supports drift, how long they last and how alike heads are, as SyncKV observed (Fig. 2)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.supports import MOST_POSITIONS, Supports, thinning
from sfi_traces.model.trace import of_steps
from sfi_traces.summary.scope import Scope
from sfi_traces.summary.synckv import MOST_STEPS, Drift, HeadSimilarity, drift

MOST_TAKEN = 1 << 25  # positions of a request; beyond, every n-th layer is taken
MOST_PAIRED = 512  # first steps of a request whose pairs are counted
MOST_SHOWN = 64  # steps of a request's matrix
DIGITS = 4

Row = dict[str, Any]


def over_time(scope: Scope) -> tuple[Row | None, Row | None]:
    """Measure attention drift (SyncKV, Fig. 2a) and temporal locality (Fig. 2b), some layers at a time.

    The drift has by `steps` the `mean` over requests, layers and heads and the number `n` behind it, the same
    by layer, and `bins` of steps 1, 2, 3-4, 5-8, ...; None unless step 0 and a later one have supports.

    The locality has in `lags` the mean over pairs of steps that are 1, 2, 3-4, 5-8, ... apart, among each
    request's first 512 audited steps, and in `overlap` a matrix of up to 64 of these steps, of the first
    request; None without two audited steps. A long trace has every n-th layer taken (`layers_taken`).
    """
    if "over_time" not in scope.kept:
        scope.kept["over_time"] = _over_time(scope)
    found: tuple[Row | None, Row | None] = scope.kept["over_time"]
    return found


def _over_time(scope: Scope) -> tuple[Row | None, Row | None]:
    drifts: list[Drift] = []
    paired: dict[int, _Pairs] = {}
    layers, taken = _layers(scope)
    for request, supports in _by_layers(scope, taken):
        paired.setdefault(request, _Pairs()).add(supports.at(slice(MOST_PAIRED)))
        with suppress(TraceError):  # a request without step 0, or without a step after
            drifts.append(drift(supports))
    said = {"layers_taken": len(taken), "layers_audited": layers}
    found = _drift_facts(drifts), _locality_facts(paired)
    drifted, local = (one and one | said for one in found)
    return drifted, local


def head_similarity(scope: Scope) -> Row | None:
    """Measure how alike the heads of one layer and of different layers are (SyncKV, Fig. 2c).

    Takes up to 64 evenly chosen audited steps of each request. `previous_layer` has each layer's overlap with
    the layer before it, None for the first. None if fewer than two layers were audited.
    """
    found: HeadSimilarity | None = None
    for request, steps in _whole_steps(scope).items():
        shown = steps[:: thinning(len(steps), MOST_STEPS)]
        layers = None if scope.layer is None else [scope.layer]
        try:
            one = HeadSimilarity.of(_read(Request.open(scope.trace, request), layers, shown))
        except TraceError:
            return None
        found = one if found is None else found + one
    if found is None:
        return None
    return {
        "steps": found.steps,
        "layers": found.layers,
        "matrix": _plain(found.matrix),
        "within": _plain(found.within),
        "between": _plain(found.between),
        "previous_layer": _plain(np.append(np.nan, np.diagonal(found.matrix, -1))),
    }


class _Pairs:
    # overlaps of every two steps of a request, summed over layers and heads

    def __init__(self) -> None:
        self.step = np.empty(0, int)
        self._heads = 0
        self._total: np.ndarray | float = 0.0

    def add(self, supports: Supports) -> None:
        self.step = supports.step_N
        heads = len(supports.places)
        self._heads += heads
        self._total = self._total + supports.overlap.astype(np.float64) * heads

    @property
    def mean(self) -> np.ndarray:
        return np.asarray(self._total / self._heads)


def _drift_facts(drifts: list[Drift]) -> Row | None:
    if not drifts:
        return None
    layers: dict[int, list[Drift]] = defaultdict(list)
    for one in drifts:
        for layer in one.layers:
            layers[layer].append(one.of(layer))
    steps, mean, n = _pooled(drifts)
    return {
        "steps": steps.tolist(),
        "mean": _plain(mean),
        "n": n.tolist(),
        "bins": [
            {"from_step": first, "to_step": last, "mean": value, "n": count}
            for first, last, value, count in _bins(steps, mean, n)
        ],
        "layers": [
            {"layer": layer, "steps": own.tolist(), "mean": _plain(values), "n": counts.tolist()}
            for layer, found in sorted(layers.items())
            for own, values, counts in [_pooled(found)]
        ],
    }


def _locality_facts(paired: dict[int, _Pairs]) -> Row | None:
    paired = {request: pairs for request, pairs in paired.items() if len(pairs.step) > 1}
    if not paired:
        return None
    upper = [(np.triu_indices(len(pairs.step), 1), pairs) for pairs in paired.values()]
    lag = np.concatenate([pairs.step[late] - pairs.step[early] for (early, late), pairs in upper])
    value = np.concatenate([pairs.mean[at] for at, pairs in upper])
    request, first = next(iter(paired.items()))
    shown = slice(None, None, thinning(len(first.step), MOST_SHOWN))
    return {
        "lags": [
            {"from_lag": low, "to_lag": high, "mean": mean, "pairs": count}
            for low, high, mean, count in _bins(lag, value, np.ones(len(lag), int))
        ],
        "request": request,
        "steps": first.step[shown].tolist(),
        "overlap": _plain(first.mean[shown, shown]),
    }


def _pooled(drifts: list[Drift]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # the steps, the mean overlap at each, and the number of overlaps behind it
    step = np.concatenate([one.step for one in drifts])
    weight = np.concatenate([np.full(len(one.step), one.points) for one in drifts])
    total = np.concatenate([one.mean * one.points for one in drifts])
    steps, place = np.unique(step, return_inverse=True)
    n = np.bincount(place, weight).astype(int)
    return steps, np.bincount(place, total) / n, n


def _bins(at: np.ndarray, mean: np.ndarray, n: np.ndarray) -> Iterator[tuple[int, int, float, int]]:
    # weighted means over 1, 2, 3-4, 5-8, ...: each bin ends at a power of two
    end = 2 ** np.ceil(np.log2(at)).astype(int)
    for last in np.unique(end).tolist():
        own = end == last
        first = last // 2 + 1
        yield first, last, _plain(np.average(mean[own], weights=n[own])), int(n[own].sum())


def _layers(scope: Scope) -> tuple[int, dict[int, int]]:
    # the number of audited layers; and of each layer taken, its most positions in a request
    audit = scope.trace.manifest.get("audit") or {"top": 0}
    rows = scope.rows("""
        SELECT layer, max(n) AS n FROM (
            SELECT request, layer, count(*) AS n FROM chosen_supports GROUP BY request, layer
        ) GROUP BY layer ORDER BY layer
    """)
    positions = {row["layer"]: int(row["n"]) * audit["top"] for row in rows}
    every = thinning(sum(positions.values()), MOST_TAKEN)
    return len(rows), dict([*positions.items()][::every])


def _by_layers(scope: Scope, layers: dict[int, int]) -> Iterator[tuple[int, Supports]]:
    # reads as many layers at once as fit into memory, since each read scans all parts
    together = max(1, MOST_POSITIONS // max(layers.values(), default=1))
    for request, steps in _whole_steps(scope).items():
        one = Request.open(scope.trace, request)
        for at in range(0, len(layers), together):
            yield request, _read(one, [*layers][at : at + together], steps)


def _whole_steps(scope: Scope) -> dict[int, list[int]]:
    # by request, the audited steps that have every layer and head
    found: dict[int, list[int]] = defaultdict(list)
    for row in scope.rows("""
        SELECT request, step FROM chosen_supports SEMI JOIN chosen_steps USING (request, step)
        GROUP BY request, step QUALIFY count(*) = max(count(*)) OVER (PARTITION BY request)
        ORDER BY request, step
    """):
        found[row["request"]].append(row["step"])
    return dict(found)


def _read(request: Request, layers: Iterable[int] | None, steps: list[int]) -> Supports:
    wanted = of_steps(np.array(steps))
    if layers is not None:
        wanted &= pc.field("layer").isin(pa.array(layers, pa.int16()))
    return Supports.where(request, wanted)


def _plain(values: np.ndarray | float) -> Any:
    # rounded; None for NaN
    rounded = np.asarray(np.round(np.asarray(values, np.float64), DIGITS))
    return np.where(np.isnan(rounded), np.array(None, object), rounded.astype(object)).tolist()
