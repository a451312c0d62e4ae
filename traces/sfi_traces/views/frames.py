"""The steps of a recorded run as plain data for a player; a step's rows are read when it is shown."""

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.selections import StepMass
from sfi_traces.model.supports import even_shares
from sfi_traces.model.trace import Trace
from sfi_traces.views.words import ALL, RECENT, SELECTED, SINK, Passage, read_passages

MEASURES = ("retained_mass", "overlap_previous_step", "overlap_last_refresh")


def playable(
    trace: Trace,
    request: int | None = None,
    layers: Collection[int] | None = None,
    heads: Collection[int] | None = None,
) -> Request:
    """Open one request of a trace, by default the first, with the layers and KV heads that fast steps change.

    Raises `TraceError` for a trace without a step or of a lossless run; `ConfigError` for a request, layer or head that
    it lacks.
    """
    if trace.lossless:
        trace.require_audit()
    chosen = Request(trace, request)
    places = chosen.support_rows.places() or chosen.selection_rows.places() or chosen.places
    places = [place for place in places if place[0] not in trace.manifest["config"]["dense_layers"]]
    if not places:
        raise TraceError(f"trace {trace.path} has no layer that fast steps change")
    chosen.choose(layers, heads, places)
    return chosen


def frame(request: Request, step: int) -> dict[str, Any]:
    """Return what is shown of a step.

    `row` of the table `steps`; `measures`, retained mass, overlaps and lambda* by column name, means over the request's
    `places`, None where not recorded; `dense`, the row of `logits`, if dense attention has another most probable token.
    """
    measured = ((request.support_rows.at(step), MEASURES), (request.selection_rows.at(step), ("lambda_star",)))
    return {
        "row": request.rows.slice(step, 1).to_pylist()[0],
        "measures": {
            name: pc.mean(rows[name]).as_py() if len(rows) else None for rows, names in measured for name in names
        },
        "dense": request.compared[step] if step in request.disagreeing else None,
    }


def strip(request: Request, step: int, width: int) -> dict[str, np.ndarray]:
    """Return a step's context in `width` bins, oldest first: the `mass` of each; `sink`, `recent`, `selected` in it."""
    memory, rows = request.memory, even_shares(request.support_rows.at(step))  # an import may have no masses
    length = int(memory.length_N[step])
    position, mass = (pc.list_flatten(rows[name]).to_numpy() for name in ("positions", "mass"))
    at, share = position.astype(np.int64) * width // length, mass.astype(np.float64) / len(request.places)
    bins, every_bin = np.arange(length) * width // length, np.arange(width)
    selected = np.concatenate([np.empty(0, int), *request.in_force(step).values()])
    return {
        "mass": np.bincount(at, share, minlength=width),
        "sink": np.isin(every_bin, bins[: memory.sink]),
        "recent": np.isin(every_bin, bins[memory.start_N[step] :]),
        "selected": np.isin(every_bin, bins[selected]),
    }


def passages(request: Request, step: int, most: int = 40) -> list[Passage]:
    """Return what a step reads: the sink, up to `most` other passages, the recent tokens.

    The others are sorted by mass, or without an audit by share, greatest first.
    """

    def weight(passage: Passage) -> tuple[float, int]:
        tokens = passage.last + 1 - passage.first
        return -(passage.share * tokens if passage.mass is None else passage.mass), passage.first

    reads = request.reads(step)
    mass = StepMass.of(even_shares(request.support_rows.at(step)), reads)
    ranked = sorted(read_passages(request.words, reads, mass), key=weight)
    sink, recent = ([passage for passage in ranked if passage.part == part] for part in (SINK, RECENT))
    return [*sink, *[passage for passage in ranked if passage.part in (SELECTED, ALL)][:most], *recent]
