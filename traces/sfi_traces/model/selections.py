"""The selections of a recorded request, and which of them are in force at a step."""

from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_traces.model.rows import Rows
from sfi_traces.read.reader import Place
from sfi_traces.schema import AHEAD

if TYPE_CHECKING:
    from sfi_traces.model.request import Request

KEYS = ("step", "layer", "head", "reason")  # of a selection

Ints = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int32]


class Selections:
    """The selections of a request, in the order of the steps that first read them.

    A slow step's selection serves the steps after it; a fast step's, and an imported indexer's, also its own
    step. Making this reads no position.

    Attributes:
        step: The step that selected.
        layer: Its layer, for each selection.
        head: Its KV head.
        begin: The first step that reads the selection.
        places: Layers and KV heads that ever selected.
    """

    def __init__(self, request: "Request") -> None:
        """Find the selections of the recorded steps."""
        trace, steps = request.trace, request.steps
        rows = trace.rows("selections", list(KEYS), request.wanted())
        key, step = _keys(rows), rows["step"].to_numpy().astype(np.int64)
        ahead = key & 1  # selected for the next step alone (FreeKV's speculative selection)
        slow = np.append(steps.slow, False)[steps.rows(step + ahead)]  # none after the last step
        begin = step + ahead + (slow & (not trace.reads_own_selection))
        order = np.argsort(begin, kind="stable")
        self._key, self.step, self.begin = key[order], step[order], begin[order]
        place = self._key >> 1 & 0xFFFFFFFF
        self.layer, self.head = place >> 16, place & 0xFFFF
        self._by_place = np.argsort(place, kind="stable")  # then by begin
        known, first = np.unique(place[self._by_place], return_index=True)
        self._begins = self.begin[self._by_place]
        self.places = [(place >> 16, place & 0xFFFF) for place in known.tolist()]
        self._edges = [*first.tolist(), len(place)]
        self._rows = Rows(trace, "selections", request.index, (*KEYS, "positions"))

    def of_place(self, place: Place) -> Ints:
        """Return the rows of a layer and KV head."""
        return np.flatnonzero((self.layer == place[0]) & (self.head == place[1]))

    def serving(self, step: int, places: Collection[Place]) -> Ints:
        """Return the rows in force at a step: the last of each of some layers and KV heads."""
        found = []
        for place, (first, end) in zip(self.places, pairwise(self._edges), strict=True):
            if place in places and self._begins[first] <= step:
                found.append(
                    first + np.searchsorted(self._begins[first:end], step, side="right") - 1
                )
        return np.sort(self._by_place[found]) if found else np.empty(0, np.int64)

    def by_place(self, rows: Ints) -> dict[Place, Positions] | None:
        """Read the positions of rows of different layers and KV heads; see `positions`."""
        found = self.positions(rows)
        keys = zip(self.layer[rows].tolist(), self.head[rows].tolist(), strict=True)
        return None if found is None else dict(zip(keys, found, strict=True))

    def positions(self, rows: Ints) -> list[Positions] | None:
        """Read the positions of some rows, ascending in each; None where the trace was recorded without.

        Raises:
            TraceError: A part is damaged.
        """
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
        found = (values[ends[row] : ends[row + 1]] for row in at.tolist())
        return [positions[positions >= 0] for positions in found]


def _keys(rows: pa.Table) -> Ints:
    # step, layer, head and whether it selected ahead, in 64 bits
    step, layer, head = (rows[name].to_numpy().astype(np.int64) for name in KEYS[:3])
    ahead = pc.fill_null(pc.equal(rows["reason"], AHEAD), False).to_numpy()
    return np.asarray(step << 33 | layer << 17 | head << 1 | ahead)
