"""How supports drift, and how alike heads are, as SyncKV observed (Fig. 2)."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.supports import Supports, thinning
from sfi_traces.model.trace import Row, of_steps
from sfi_traces.overlap import Overlap, coefficients

MOST_COMPARED = 64  # steps of a request, evenly chosen, at which heads are compared
DIGITS = 4


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
    """Measure attention drift (SyncKV, Fig. 2a).

    Has by `steps` the `mean` over requests, layers and heads and their number `n`, and `bins` of steps 1, 2, 3-4, ...
    A long trace has every n-th layer taken. None unless step 0 and a later one have supports.
    """
    steps: list[np.ndarray] = []
    overlaps: list[np.ndarray] = []
    taken = audited = 0
    for part in _audited(request):
        taken, audited = max(taken, len(part.supports.layers)), max(audited, part.audited_layers)
        with suppress(TraceError):  # a request without step 0, or without a step after
            step_S, overlap_US = drift(part.supports)
            steps.append(np.tile(step_S, len(overlap_US)))
            overlaps.append(overlap_US.ravel())
    if not steps:
        return None
    step, overlap = np.concatenate(steps), np.concatenate(overlaps)
    keys, means, counts = _means(step, overlap)
    # each bin ends at a power of two
    bins = zip(*_means(2 ** np.ceil(np.log2(step)).astype(int), overlap), strict=True)
    return {
        "steps": keys,
        "mean": means,
        "n": counts,
        "bins": [{"from_step": last // 2 + 1, "to_step": last, "mean": mean, "n": n} for last, mean, n in bins],
        "layers_taken": taken,
        "layers_audited": audited,
    }


def _means(key: np.ndarray, overlap: np.ndarray) -> tuple[list[int], Any, list[int]]:
    # the keys, ascending, and the mean and the number of the overlaps of each
    keys, place, n = np.unique(key, return_inverse=True, return_counts=True)
    return keys.tolist(), _plain(np.bincount(place, overlap) / n), n.tolist()


def compare_heads(requests: Iterable[Supports]) -> Row:
    """Average the overlap of two KV heads at the same step (SyncKV, Eq. 1) over the `steps` of requests, at least one.

    `matrix` [L, L] has the mean over pairs of a head of the row's and one of the column's of the `layers`, ascending;
    its diagonal excludes a head's overlap with itself. `within` is over two heads of one layer, `between` of two
    layers. NaN where layers have one head.

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
    with np.errstate(invalid="ignore"):  # NaN where nothing was counted
        within, between = (float(total_LL[at].sum() / count_LL[at].sum()) for at in (same_LL, ~same_LL))
        matrix = total_LL / count_LL
    return {"steps": steps, "layers": layers, "matrix": matrix, "within": within, "between": between}


def head_similarity(request: Request) -> Row | None:
    """Measure how alike the heads of one layer and of different layers are (SyncKV, Fig. 2c).

    Takes up to 64 evenly chosen audited steps of each request. `previous_layer` has each layer's overlap with
    the layer before it, None for the first. None if fewer than two layers were audited.
    """
    parts = [*_audited(request)]
    if not parts:
        return None
    try:
        heads = compare_heads(map(_some_steps, parts))
    except TraceError:
        return None
    previous = np.append(np.nan, np.diagonal(heads["matrix"], -1))
    values = {name: heads[name] for name in ("matrix", "within", "between")} | {"previous_layer": previous}
    return heads | {name: _plain(value) for name, value in values.items()}


def _audited(request: Request) -> Iterator[Request]:
    # each of the chosen requests that has supports
    for row in request.query("""
        SELECT DISTINCT request FROM chosen_supports SEMI JOIN chosen_steps USING (request, step) ORDER BY request
    """):
        yield Request.of(request.trace, row["request"], request.layer)


def _some_steps(request: Request) -> Supports:
    steps = np.unique(request.trace.rows("supports", ["step"], request.wanted)["step"].to_numpy())
    return request.supports_where(of_steps(steps[:: thinning(len(steps), MOST_COMPARED)]))


def _plain(values: np.ndarray | float) -> Any:
    # rounded; None for NaN
    rounded = np.asarray(np.round(np.asarray(values, np.float64), DIGITS))
    return np.where(np.isnan(rounded), np.array(None, object), rounded.astype(object)).tolist()
