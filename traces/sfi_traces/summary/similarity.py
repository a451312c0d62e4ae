"""How supports drift, and how alike heads are, as SyncKV observed (Fig. 2)."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.supports import MOST_POSITIONS, Supports, thinning
from sfi_traces.model.trace import Row, of_steps
from sfi_traces.overlap import Overlap, coefficients

MOST_TAKEN = 1 << 25  # positions of a request; beyond, every n-th layer is taken
MOST_COMPARED = 64  # steps of a request, evenly chosen, at which heads are compared
DIGITS = 4

Drifts = list[tuple[np.ndarray, np.ndarray]]  # of pieces of requests; see `drift`


def drift(supports: Supports) -> tuple[np.ndarray, np.ndarray]:
    """Compare each step's supports with step 0's by the overlap coefficient (SyncKV, Eq. 1).

    Paper gap: SyncKV compares with the prefill without saying which of its queries counts; step 0 is the
    prompt's last position, whose support is the first that decoding could have kept.

    Returns the S audited steps from 1 on, [S], and the overlaps of U layers x KV heads, [U, S].

    Raises `TraceError` if step 0, or every later step, has no support.
    """
    if not supports.steps or supports.step_N[0] != 0:
        raise TraceError("drift needs the support of step 0, the prompt's, got none; record the trace with --audit 1")
    if supports.steps == 1:
        raise TraceError("drift needs an audited step after step 0, got none; record the trace with --audit 1")
    first_1UK, later_SUK = supports.position_NUK[:1], supports.position_NUK[1:]
    of_unit = [
        Overlap.of(np.repeat(first_1UK[:, unit], len(later_SUK), 0), later_SUK[:, unit]).coefficient
        for unit in range(len(supports.layer_U))
    ]
    return supports.step_N[1:], np.stack(of_unit)


def drift_facts(request: Request) -> Row | None:
    """Measure attention drift (SyncKV, Fig. 2a), some layers at a time.

    Has by `steps` the `mean` over requests, layers and heads and the number `n` behind it, and `bins` of steps 1, 2,
    3-4, 5-8, ... A long trace has every n-th layer taken (`layers_taken`). None unless step 0 and a later one have
    supports.
    """
    drifts: Drifts = []
    layers, taken = _layers(request)
    for supports in _by_layers(request, taken):
        with suppress(TraceError):  # a request without step 0, or without a step after
            drifts.append(drift(supports))
    if not drifts:
        return None
    steps, mean, n = _pooled(drifts)
    return {
        "steps": steps.tolist(),
        "mean": _plain(mean),
        "n": n.tolist(),
        "bins": [
            {"from_step": first, "to_step": last, "mean": value, "n": count}
            for first, last, value, count in _bins(steps, mean, n)
        ],
        "layers_taken": len(taken),
        "layers_audited": layers,
    }


@dataclass(frozen=True, slots=True)
class HeadSimilarity:
    """Overlap of two KV heads at the same step, the mean over `steps`.

    Attributes:
        layers: The L layers, ascending.
        matrix: Mean over pairs of a head of the row's layer and one of the column's, [L, L]. The diagonal excludes a
            head's overlap with itself; it is NaN where a layer has one head.
        within: Mean over two heads of one layer; NaN where every layer has one head.
        between: Mean over two heads of different layers.
    """

    layers: list[int]
    matrix: np.ndarray
    within: float
    between: float
    steps: int

    @classmethod
    def of(cls, requests: Iterable[Supports]) -> Self:
        """Compare all heads at each step of some requests (SyncKV, Eq. 1), at least one.

        Paper gap: SyncKV averages "from each head in a source layer to a target layer"; each head of the
        target layer counts alike here, and not the most similar one alone.

        Raises `TraceError` for a single layer.
        """
        total_UU: np.ndarray | float = 0.0
        steps = 0
        for supports in requests:
            layers = supports.layers
            if len(layers) < 2:  # noqa: PLR2004
                raise TraceError(
                    f"head similarity needs two audited layers or more, got layer {layers[0]} alone; leave "
                    "--layer out, or record the trace with --audit 1 of all layers"
                )
            for index_UK in supports.position_NUK:
                total_UU = total_UU + coefficients(index_UK).astype(np.float64)
            steps += supports.steps
        of_LU = np.array([supports.layer_U == layer for layer in layers], float)
        pair_UU = 1 - np.eye(len(supports.layer_U))  # without a head and itself
        total_LL, count_LL = of_LU @ (total_UU * pair_UU) @ of_LU.T, of_LU @ pair_UU @ of_LU.T * steps
        same_LL = np.eye(len(layers), dtype=bool)
        within, between = (_ratio(total_LL[chosen].sum(), count_LL[chosen].sum()) for chosen in (same_LL, ~same_LL))
        return cls(layers, _ratio(total_LL, count_LL), float(within), float(between), steps)


def head_similarity(request: Request) -> Row | None:
    """Measure how alike the heads of one layer and of different layers are (SyncKV, Fig. 2c).

    Takes up to 64 evenly chosen audited steps of each request. `previous_layer` has each layer's overlap with
    the layer before it, None for the first. None if fewer than two layers were audited.
    """
    steps_of = _whole_steps(request)
    layers = None if request.layer is None else [request.layer]
    compared = (
        _read(Request(request.trace, index), layers, steps[:: thinning(len(steps), MOST_COMPARED)])
        for index, steps in steps_of.items()
    )
    try:
        similarity = HeadSimilarity.of(compared) if steps_of else None
    except TraceError:
        return None
    if similarity is None:
        return None
    return {
        "steps": similarity.steps,
        "layers": similarity.layers,
        "matrix": _plain(similarity.matrix),
        "within": _plain(similarity.within),
        "between": _plain(similarity.between),
        "previous_layer": _plain(np.append(np.nan, np.diagonal(similarity.matrix, -1))),
    }


def _pooled(drifts: Drifts) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # the steps, the mean overlap at each, and the number of overlaps behind it
    step = np.concatenate([step_S for step_S, _ in drifts])
    weight = np.concatenate([np.full(len(step_S), len(overlap_US)) for step_S, overlap_US in drifts])
    total = np.concatenate([overlap_US.mean(0) * len(overlap_US) for _, overlap_US in drifts])
    steps, place = np.unique(step, return_inverse=True)
    n = np.bincount(place, weight).astype(int)
    return steps, np.bincount(place, total) / n, n


def _bins(at: np.ndarray, mean: np.ndarray, n: np.ndarray) -> Iterator[tuple[int, int, float, int]]:
    # weighted means over 1, 2, 3-4, 5-8, ...: each bin ends at a power of two
    end = 2 ** np.ceil(np.log2(at)).astype(int)
    for last in np.unique(end).tolist():
        inside = end == last
        yield last // 2 + 1, last, _plain(np.average(mean[inside], weights=n[inside])), int(n[inside].sum())


def _layers(request: Request) -> tuple[int, dict[int, int]]:
    # the number of audited layers; and of each layer taken, its most positions in a request
    audit = request.trace.manifest.get("audit") or {"top": 0}
    rows = request.query("""
        SELECT layer, max(n) AS n FROM (
            SELECT request, layer, count(*) AS n FROM chosen_supports GROUP BY request, layer
        ) GROUP BY layer ORDER BY layer
    """)
    positions = {row["layer"]: int(row["n"]) * audit["top"] for row in rows}
    every = thinning(sum(positions.values()), MOST_TAKEN)
    return len(rows), dict([*positions.items()][::every])


def _by_layers(request: Request, layers: dict[int, int]) -> Iterator[Supports]:
    # reads as many layers at once as fit into memory, since each read scans all parts
    together = max(1, MOST_POSITIONS // max(layers.values(), default=1))
    for index, steps in _whole_steps(request).items():
        alone = Request(request.trace, index)
        for at in range(0, len(layers), together):
            yield _read(alone, [*layers][at : at + together], steps)


def _whole_steps(request: Request) -> dict[int, list[int]]:
    # by request, the audited steps that have every layer and head
    steps_of: dict[int, list[int]] = defaultdict(list)
    for row in request.query("""
        SELECT request, step FROM chosen_supports SEMI JOIN chosen_steps USING (request, step)
        GROUP BY request, step QUALIFY count(*) = max(count(*)) OVER (PARTITION BY request)
        ORDER BY request, step
    """):
        steps_of[row["request"]].append(row["step"])
    return dict(steps_of)


def _read(request: Request, layers: Iterable[int] | None, steps: list[int]) -> Supports:
    wanted = of_steps(np.array(steps))
    if layers is not None:
        wanted &= pc.field("layer").isin(pa.array(layers, pa.int16()))
    return request.supports_where(wanted)


def _ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    # NaN where nothing was counted
    total, count = np.asarray(total), np.asarray(count)
    return np.asarray(np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0))


def _plain(values: np.ndarray | float) -> Any:
    # rounded; None for NaN
    rounded = np.asarray(np.round(np.asarray(values, np.float64), DIGITS))
    return np.where(np.isnan(rounded), np.array(None, object), rounded.astype(object)).tolist()
