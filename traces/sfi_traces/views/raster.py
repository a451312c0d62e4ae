"""The support raster: the positions of each step's support, and which of them the step read."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sfi_core.errors import TraceError
from sfi_traces.views.figure_data import retained_mass
from sfi_traces.views.reads import Refreshes, Segments
from sfi_traces.views.stability import Place, thinning
from sfi_traces.views.view import View

# what a cell shows
NOTHING, SELECTED, READ, MISSED = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raster:
    """Supports of one layer and KV head.

    Attributes:
        place: The layer and KV head.
        top: Positions of a support, K.
        step: Audited steps, ascending.
        per_cell: Positions of a cell.
        cells: `[positions / per_cell, steps]` uint8. A cell with at least as many positions of the support as
            an even spread would give is `MISSED` if most of them were not read, else `READ`, also if unknown.
            Another cell is `SELECTED` if that many were selected, else `NOTHING`.
        slow: Whether each step was slow.
        context: Tokens cached at each step.
        sink: Sink tokens; 0 for full attention.
        recent: First position of each step's recent segment; None for full attention.
        known: Whether the trace has the run's selections.
    """

    place: Place
    top: int
    step: np.ndarray
    per_cell: int
    cells: np.ndarray
    slow: np.ndarray
    context: np.ndarray
    sink: int
    recent: np.ndarray | None
    known: bool


@dataclass(frozen=True, slots=True)
class Selected:
    """The selections of one layer and KV head: an empty set and those of each refresh.

    Attributes:
        since: For each step the index of its set.
    """

    sets: list[np.ndarray]
    since: np.ndarray


def rasters(
    view: View, places: Sequence[Place], *, most_steps: int, most_cells: int
) -> list[Raster]:
    """Compute the rasters of several layers and KV heads.

    If the view has no `top`, supports are cut to the run's budget, so that missed positions mean something.
    Beyond `most_steps` every n-th step is taken; beyond `most_cells` a cell stands for several positions.
    """
    manifest = view.trace.manifest
    top = view.top or min(manifest["audit"]["top"], manifest["config"]["budget"])
    supports = view.supports.thinned(most_steps)
    rows = view.steps.rows(supports.step)
    context, slow = view.steps.context[rows], view.steps.slow[rows]
    per_cell = thinning(int(context.max()), most_cells)
    segments = Segments.of(view)
    sink = segments.sink
    recent = None if segments.recent is None else segments.recent[rows]
    selected = _in_force(Refreshes.of(view), places, supports.step)
    drawn = []
    for place in places:
        chosen = selected.get(place)
        sets = supports.of(place).strongest(top).sets[place]
        cells = _cells(sets, chosen, context, slow, sink, recent, per_cell)
        drawn.append(
            Raster(
                place=place, top=top, step=supports.step, per_cell=per_cell, cells=cells, slow=slow,
                context=context, sink=sink, recent=recent, known=chosen is not None,
            )
        )  # fmt: skip
    return drawn


def choose_place(view: View) -> tuple[Place, str]:
    """Choose the layer and KV head whose fast steps retain the least mass, and give the reason in words.

    Without fast steps it is the one whose supports have the most mass.
    """
    found = list(view.supports.sets)
    if len(found) == 1 or not view.trace.masses:
        return found[0], ""
    data = retained_mass(view)
    mass = {
        (layer, head): data.mass[row, column]
        for row, layer in enumerate(data.layers)
        for column, head in enumerate(data.heads)
    }
    if data.coverage:
        return max(found, key=mass.__getitem__), "supports hold the most mass"
    return min(found, key=mass.__getitem__), "fast steps retain the least mass"


def meaning(raster: Raster) -> dict[int, str]:
    """Explain each kind of cell that the raster has."""
    words = {
        READ: "in the support, read" if raster.known else "in the support",
        MISSED: "in the support, not read",
        SELECTED: "selected, not in the support",
    }
    return {kind: text for kind, text in words.items() if (raster.cells == kind).any()}


def _in_force(
    refreshes: Refreshes, places: Sequence[Place], step: np.ndarray
) -> dict[Place, Selected]:
    # the selections of each place at the steps; places that selected nothing are left out
    found = {}
    for place in places:
        rows = refreshes.of_place(place)
        since = np.searchsorted(refreshes.begin[rows], step, side="right")  # 0: nothing yet
        needed, since = np.unique(since, return_inverse=True)
        if needed[-1]:
            found[place] = rows[needed[needed > 0] - 1], since + (needed[0] > 0)
    chosen = [rows for rows, _ in found.values()]
    try:
        sets = refreshes.positions(np.concatenate(chosen)) if chosen else []
    except TraceError:  # recorded without positions
        return {}
    ends = np.cumsum([len(rows) for rows in chosen])
    return {
        place: Selected([np.empty(0, np.int32), *sets[end - len(rows) : end]], since)
        for end, (place, (rows, since)) in zip(ends, found.items(), strict=True)
    }


def _cells(
    sets: list[np.ndarray],
    chosen: Selected | None,
    context: np.ndarray,
    slow: np.ndarray,
    sink: int,
    recent: np.ndarray | None,
    per_cell: int,
) -> np.ndarray:
    high = -(-int(context.max()) // per_cell)
    selected = np.zeros((high, len(sets)), bool)
    row, position = _flat(sets)
    read = np.ones(len(position), bool)
    if chosen is not None and recent is not None:
        read = slow[row] | (position < sink) | (position >= recent[row])
        read |= _is_in(position, chosen.since[row], chosen.sets, int(context.max()))
        taken = [chosen.sets[at] for at in chosen.since]
        selected = _dense(
            _count(*_flat(taken), len(sets), high, per_cell), taken, context, per_cell
        )
    hits, misses = (
        _count(row[kind], position[kind], len(sets), high, per_cell) for kind in (read, ~read)
    )
    held = _dense(hits + misses, sets, context, per_cell)
    kinds = np.where(held, np.where(misses > hits, MISSED, READ), selected * SELECTED)
    return kinds.astype(np.uint8)


def _flat(sets: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(len(sets)), [len(one) for one in sets]), np.concatenate(sets)


def _count(
    row: np.ndarray, position: np.ndarray, rows: int, high: int, per_cell: int
) -> np.ndarray:
    # how many positions of each row are in each cell, [high, rows]
    cell = position // per_cell * rows + row
    return np.bincount(cell, minlength=high * rows).reshape(high, rows)


def _dense(
    count: np.ndarray, sets: list[np.ndarray], context: np.ndarray, per_cell: int
) -> np.ndarray:
    # whether a cell has at least one position, and as many as an even spread would give
    size = np.array([len(one) for one in sets])
    found: np.ndarray = count >= np.maximum(1, size * per_cell / context)
    return found


def _is_in(
    position: np.ndarray, which: np.ndarray, sets: list[np.ndarray], width: int
) -> np.ndarray:
    # whether each position is in the set with its number; sets ascend, so their keys do too
    keys = np.concatenate(
        [number * width + one.astype(np.int64) for number, one in enumerate(sets)]
    )
    wanted = which * width + position
    at = np.searchsorted(keys, wanted)
    found: np.ndarray = np.append(keys, -1)[at] == wanted
    return found
