"""The selections of a recorded request, which of them are in force at a step, and what a step read."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_traces.model.rows import Rows
from sfi_traces.model.steps import Bools, Ints, Positions, Steps
from sfi_traces.model.trace import Place, Trace, rows_of
from sfi_traces.schema import AHEAD

KEYS = ("step", "layer", "head", "reason")  # of a selection


class Selections:
    """The selections of a request, in the order of the steps that first read them.

    A slow step's selection serves the steps after it; a fast step's, and an imported indexer's, also its own
    step. Making this reads no position.

    Attributes:
        step: The step that selected, for each selection.
        begin: The first step that reads it.
        of_place: The selections of each layer and KV head that ever selected.
    """

    def __init__(self, trace: Trace, request: int, steps: Steps) -> None:
        """Find the selections of the recorded steps."""
        wanted = rows_of(request) & (pc.field("step") <= int(steps.step[-1]))
        rows = trace.rows("selections", list(KEYS), wanted)
        key, step = _keys(rows), rows["step"].to_numpy().astype(np.int64)
        ahead = key & 1  # selected for the next step alone (FreeKV's speculative selection)
        slow = np.append(steps.slow, False)[steps.rows(step + ahead)]  # none after the last step
        begin = step + ahead + (slow & (not trace.reads_own_selection))
        order = np.argsort(begin, kind="stable")
        self._key = key[order]
        self.step, self.begin = (each[order].astype(np.int32) for each in (step, begin))
        place = self._key >> 1 & 0xFFFFFFFF
        self.layer, self.head = (each.astype(np.int16) for each in (place >> 16, place & 0xFFFF))
        by_place = np.argsort(place, kind="stable")
        first = np.flatnonzero(np.diff(place[by_place], prepend=-1))
        pieces = zip(place[by_place[first]].tolist(), np.split(by_place, first[1:]), strict=False)
        self.of_place: dict[Place, Ints] = {(at >> 16, at & 0xFFFF): rows for at, rows in pieces}
        self._rows = Rows(trace, "selections", request, (*KEYS, "positions"))

    def serving(self, step: int, places: Collection[Place]) -> Ints:
        """Return the selections in force at a step: the last of each of some layers and KV heads."""
        rows = np.array([self.in_force(place, np.array(step)) for place in places], np.int64)
        return np.sort(rows[rows >= 0])

    def in_force(self, place: Place, step: np.ndarray) -> Ints:
        """Return for each step the selection of a layer and KV head that is in force, the last one; -1 for none."""
        rows = self.of_place.get(place, np.empty(0, np.int64))
        latest = np.searchsorted(self.begin[rows], step, side="right") - 1
        return np.append(rows, -1)[latest]  # before the first one that is the last entry

    def by_place(self, rows: Ints) -> dict[Place, Positions] | None:
        """Read the positions of rows of different layers and KV heads; see `positions`."""
        positions = self.positions(rows)
        keys = zip(self.layer[rows].tolist(), self.head[rows].tolist(), strict=True)
        return None if positions is None else dict(zip(keys, positions, strict=True))

    def positions(self, rows: Ints) -> list[Positions] | None:
        """Read the positions of some rows, ascending in each; None where the trace was recorded without."""
        if not len(rows):
            return []
        table = self._rows.at(self.step[rows])
        if table["positions"].null_count:
            return None
        lists = table["positions"].combine_chunks()
        values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
        keys = _keys(table)
        order = np.argsort(keys, kind="stable")
        at = order[np.searchsorted(keys[order], self._key[rows], side="right") - 1]
        lists = (values[ends[row] : ends[row + 1]] for row in at.tolist())
        return [positions[positions >= 0] for positions in lists]


def _keys(rows: pa.Table) -> Ints:
    # step, layer, head and whether it selected ahead, in 64 bits
    step, layer, head = (rows[name].to_numpy().astype(np.int64) for name in KEYS[:3])
    ahead = pc.fill_null(pc.equal(rows["reason"], AHEAD), False).to_numpy()
    return np.asarray(step << 33 | layer << 17 | head << 1 | ahead)


@dataclass(frozen=True, slots=True)
class StepReads:
    """The positions that a step read, by layer and KV head.

    Attributes:
        places: The layers and KV heads that are looked at; `dense` are those that read everything.
        sink: Sink tokens that the others read; `recent` is the first of the recent tokens that they read.
        context: Cached tokens.
        selected: Positions selected for the others; None where the trace was recorded without.
        refreshed: Steps that selected them.
    """

    places: Sequence[Place]
    dense: set[Place]
    sink: int
    recent: int
    context: int
    selected: dict[Place, Positions] | None
    refreshed: list[int]

    def of_place(self, place: Place, position: Positions) -> Bools:
        """Say for each position whether a layer and KV head read it."""
        if place in self.dense:
            return np.ones(len(position), bool)
        around: Bools = (position < self.sink) | (position >= self.recent)
        return around | np.isin(position, (self.selected or {}).get(place, ()))


@dataclass(frozen=True, slots=True)
class StepMass:
    """Where a step's dense attention lay: by place the positions, their mass, and whether it read them."""

    by_place: dict[Place, tuple[Positions, npt.NDArray[np.float32], Bools]]

    @classmethod
    def of(cls, rows: pa.Table, reads: StepReads) -> Self:
        """Take a step's rows of the table `supports`; those of other layers and heads are left out."""
        by_place, places = {}, set(reads.places)
        for row in rows.sort_by([("layer", "ascending"), ("head", "ascending")]).to_pylist():
            place = row["layer"], row["head"]
            if place in places:
                position = np.array(row["positions"], int)
                seen = row["read"]  # an import has none
                read = reads.of_place(place, position) if seen is None else np.array(seen, bool)
                mass: Any = np.zeros(len(position)) if row["mass"] is None else np.array(row["mass"], float)
                by_place[place] = position, mass, read
        return cls(by_place)

    def weight(self, context: int, *, read: bool) -> npt.NDArray[np.float64]:
        """Return each position's mean mass over the places that read it, or over those that did not."""
        weight = np.zeros(context)
        for position, mass, seen in self.by_place.values():
            weight[position[seen == read]] += mass[seen == read] / len(self.by_place)
        return weight

    def marks(self, *, read: bool) -> dict[Place, Positions]:
        """Return the positions that each place read, or did not read."""
        return {place: position[seen == read] for place, (position, _, seen) in self.by_place.items()}
