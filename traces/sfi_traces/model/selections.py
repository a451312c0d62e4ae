"""The selections of a recorded request, and which of them are in force at a step."""

from collections.abc import Collection

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sfi_traces.model.rows import Rows
from sfi_traces.model.steps import Ints, Positions, Steps
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
        self.of_place: dict[Place, Ints] = {(at >> 16, at & 0xFFFF): own for at, own in pieces}
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
        found = self.positions(rows)
        keys = zip(self.layer[rows].tolist(), self.head[rows].tolist(), strict=True)
        return None if found is None else dict(zip(keys, found, strict=True))

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
        found = (values[ends[row] : ends[row + 1]] for row in at.tolist())
        return [positions[positions >= 0] for positions in found]


def _keys(rows: pa.Table) -> Ints:
    # step, layer, head and whether it selected ahead, in 64 bits
    step, layer, head = (rows[name].to_numpy().astype(np.int64) for name in KEYS[:3])
    ahead = pc.fill_null(pc.equal(rows["reason"], AHEAD), False).to_numpy()
    return np.asarray(step << 33 | layer << 17 | head << 1 | ahead)
