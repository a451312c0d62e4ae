"""What one step of a request read: the sink, its selection, and the recent tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfi_traces.model.request import Request
from sfi_traces.model.steps import Bools, Positions
from sfi_traces.model.trace import Place


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

    @classmethod
    def of(cls, request: Request, row: int) -> Self:
        """Find what the step in row `row` of the request's steps read in the request's `places`."""
        trace, memory, places = request.trace, request.memory, request.places
        slow = memory.slow_N[row] and not trace.reads_own_selection
        left_dense = trace.manifest["config"]["dense_layers"]
        dense = {place for place in places if slow or place[0] in left_dense}
        context, (sink, start_N) = int(memory.length_N[row]), request.segments
        recent = context if start_N is None else int(start_N[row])
        selected: dict[Place, Positions] | None = {}
        refreshed: list[int] = []
        if sparse := set(places) - dense:
            selections = request.selections
            rows = selections.serving(int(request.steps.step[row]), sparse)
            selected = selections.by_place(rows)
            refreshed = sorted(set(selections.step[rows].tolist()))
        return cls(places, dense, sink, recent, context, selected, refreshed)

    def of_place(self, place: Place, position: Positions) -> Bools:
        """Say for each position whether a layer and KV head read it."""
        if place in self.dense:
            return np.ones(len(position), bool)
        found: Bools = (position < self.sink) | (position >= self.recent)
        return found | np.isin(position, (self.selected or {}).get(place, ()))


@dataclass(frozen=True, slots=True)
class StepMass:
    """Where a step's dense attention lay: by place the positions, their mass, and whether it read them."""

    found: dict[Place, tuple[Positions, npt.NDArray[np.float32], Bools]]

    @classmethod
    def of(cls, rows: pa.Table, reads: StepReads) -> Self:
        """Take a step's rows of the table `supports`; those of other layers and heads are left out."""
        found, places = {}, set(reads.places)
        for row in rows.sort_by([("layer", "ascending"), ("head", "ascending")]).to_pylist():
            place = row["layer"], row["head"]
            if place in places:
                position = np.array(row["positions"], int)
                seen = row["read"]  # an import has none
                read = reads.of_place(place, position) if seen is None else np.array(seen, bool)
                mass: Any = np.zeros(len(position)) if row["mass"] is None else np.array(row["mass"], float)
                found[place] = position, mass, read
        return cls(found)

    def weight(self, context: int, *, read: bool) -> npt.NDArray[np.float64]:
        """Return each position's mean mass over the places that read it, or over those that did not."""
        weight = np.zeros(context)
        for position, mass, seen in self.found.values():
            weight[position[seen == read]] += mass[seen == read] / len(self.found)
        return weight

    def marks(self, *, read: bool) -> dict[Place, Positions]:
        """Return the positions that each place read, or did not read."""
        return {place: position[seen == read] for place, (position, _, seen) in self.found.items()}
