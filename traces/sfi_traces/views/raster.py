"""The support raster: the positions of each step's support, and which of them the step read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sfi_traces.model.request import Request
from sfi_traces.model.selections import Selections
from sfi_traces.model.supports import thinning
from sfi_traces.model.trace import Place
from sfi_traces.overlap import size
from sfi_traces.views.figure_data import retained_mass

# what a cell shows
NOTHING, SELECTED, READ, MISSED = range(4)
# a layer and KV head's sets, an empty one first, and the index of each step's
Chosen = tuple[list[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raster:
    """Supports of one layer and KV head, and what its steps read.

    Attributes:
        top: Positions of a support, K.
        cells: `[positions / per_cell, steps]` uint8. A cell with at least as many positions of the support as
            an even spread would give is `MISSED` if most of them were not read, else `READ`, also if unknown.
            Another cell is `SELECTED` if that many were selected, else `NOTHING`.
        context: Tokens cached at each step.
        sink: Sink tokens; 0 for full attention.
        recent: First position of each step's recent segment; None for full attention.
        known: Whether the trace has the run's selections.
    """

    place: Place
    top: int
    step_N: np.ndarray
    per_cell: int
    cells: np.ndarray
    slow: np.ndarray
    context: np.ndarray
    sink: int
    recent: np.ndarray | None
    known: bool


def rasters(request: Request, places: Sequence[Place], *, most_steps: int, most_cells: int) -> list[Raster]:
    """Compute the rasters of several layers and KV heads.

    If the request has no `top`, supports are cut to the run's budget, so that missed positions mean something.
    Beyond `most_steps` every n-th step is taken; beyond `most_cells` a cell stands for several positions.
    """
    manifest = request.trace.manifest
    top = request.top or min(manifest["audit"]["top"], manifest["config"]["budget"])
    supports = request.supports.thinned(most_steps)
    rows = request.steps.rows(supports.step_N)
    context, slow = request.steps.context[rows], request.steps.slow[rows]
    per_cell = thinning(int(context.max()), most_cells)
    sink, start_N = request.segments
    recent = None if start_N is None else start_N[rows]
    selected = _in_force(request.selections, places, supports.step_N)
    drawn = []
    for place in places:
        chosen = selected.get(place)
        index_NK = supports.of_places([place]).strongest(top).position_NUK[:, 0]
        cells = _cells(index_NK, chosen, context, slow, sink, recent, per_cell)
        drawn.append(
            Raster(
                place=place, top=top, step_N=supports.step_N, per_cell=per_cell, cells=cells, slow=slow,
                context=context, sink=sink, recent=recent, known=chosen is not None,
            )
        )  # fmt: skip
    return drawn


def choose_place(request: Request) -> tuple[Place, str]:
    """Choose the layer and KV head whose fast steps retain the least mass, and give the reason in words.

    Without fast steps it is the one whose supports have the most mass.
    """
    found = request.supports.places
    if len(found) == 1 or not request.trace.masses:
        return found[0], ""
    data = retained_mass(request)
    if data.coverage:
        return max(found, key=data.of_place.__getitem__), "supports hold the most mass"
    return min(found, key=data.of_place.__getitem__), "fast steps retain the least mass"


def meaning(raster: Raster) -> dict[int, str]:
    """Explain each kind of cell that the raster has."""
    words = {
        READ: "in the support, read" if raster.known else "in the support",
        MISSED: "in the support, not read",
        SELECTED: "selected, not in the support",
    }
    return {kind: text for kind, text in words.items() if (raster.cells == kind).any()}


def _in_force(selections: Selections, places: Sequence[Place], step: np.ndarray) -> dict[Place, Chosen]:
    # places that selected nothing are left out
    in_force = {place: selections.in_force(place, step) for place in places}
    needed = np.unique(np.concatenate([np.array([-1]), *in_force.values()]))[1:]
    sets = selections.positions(needed)
    if sets is None:
        return {}
    chosen = {}
    for place, rows in in_force.items():
        own, since = np.unique(np.append(rows, -1), return_inverse=True)
        if len(own) > 1:
            of_place = [sets[at] for at in np.searchsorted(needed, own[1:])]
            chosen[place] = ([np.empty(0, np.int32), *of_place], since[:-1])
    return chosen


def _cells(
    index_NK: np.ndarray,
    chosen: Chosen | None,
    context: np.ndarray,
    slow: np.ndarray,
    sink: int,
    recent: np.ndarray | None,
    per_cell: int,
) -> np.ndarray:
    high = -(-int(context.max()) // per_cell)
    steps = len(index_NK)
    selected = np.zeros((high, steps), bool)
    row, column = np.nonzero(index_NK >= 0)
    position = index_NK[row, column]
    read = np.ones(len(position), bool)
    if chosen is not None and recent is not None:
        read = slow[row] | (position < sink) | (position >= recent[row])
        sets, since = chosen
        read |= _is_in(position, since[row], sets, int(context.max()))
        taken = [sets[at] for at in since]
        sizes = np.array([len(one) for one in taken])
        counts = _count(np.repeat(np.arange(steps), sizes), np.concatenate(taken), steps, high, per_cell)
        selected = _dense(counts, sizes, context, per_cell)
    hits, misses = (_count(row[kind], position[kind], steps, high, per_cell) for kind in (read, ~read))
    held = _dense(hits + misses, size(index_NK), context, per_cell)
    kinds = np.where(held, np.where(misses > hits, MISSED, READ), selected * SELECTED)
    return kinds.astype(np.uint8)


def _count(row: np.ndarray, position: np.ndarray, rows: int, high: int, per_cell: int) -> np.ndarray:
    # how many positions of each row are in each cell, [high, rows]
    cell = position // per_cell * rows + row
    return np.bincount(cell, minlength=high * rows).reshape(high, rows)


def _dense(count: np.ndarray, sizes: np.ndarray, context: np.ndarray, per_cell: int) -> np.ndarray:
    # whether a cell has at least one position, and as many as an even spread would give
    return np.asarray(count >= np.maximum(1, sizes * per_cell / context))


def _is_in(position: np.ndarray, which: np.ndarray, sets: list[np.ndarray], width: int) -> np.ndarray:
    # whether each position is in the set with its number; sets ascend, so their keys do too
    keys = np.concatenate([number * width + one.astype(np.int64) for number, one in enumerate(sets)])
    wanted = which * width + position
    return np.asarray(np.append(keys, -1)[np.searchsorted(keys, wanted)] == wanted)
