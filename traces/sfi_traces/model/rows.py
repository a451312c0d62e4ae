"""Reads the rows of single steps of a long table, through the row groups that may hold them."""

from collections.abc import Collection
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from sfi_traces.model.files import DAMAGED, checked
from sfi_traces.model.trace import Place, Trace
from sfi_traces.overlap import Ints
from sfi_traces.schema import TABLES

KEYS, VALUES = 4, 2  # row groups whose keys and whose columns are cached
KEY = ["request", "step", "layer", "head"]
UNKNOWN = {"min": -np.inf, "max": np.inf}  # another writer may leave statistics out


class Rows:
    """One request's rows of a table with layer and KV head, found by step.

    The keys of at most 4 row groups and the columns of 2 stay in memory; a recorded row group has at most 64 MiB.
    `layers` and `heads` limit the rows that are wanted; None for all.
    """

    def __init__(self, trace: Trace, table: str, request: int, columns: Collection[str]) -> None:
        """Read the footers of the parts, and no row; raises `TraceError` for a truncated part."""
        self.layers: Collection[int] | None = None
        self.heads: Collection[int] | None = None
        self._trace, self._table, self._request = trace, table, request
        source, names = trace.dataset(table), list(columns)
        self._nothing = TABLES[table].empty_table().select(names)
        self._groups: list[tuple[Any, float, float]] = []  # row groups, with their first and last step
        for part in [] if isinstance(source, pa.Table) else source.get_fragments():
            try:
                for group in part.split_by_row_group(pc.field("request") == request):
                    step = group.row_groups[0].statistics.get("step", UNKNOWN)
                    if not isinstance(step["min"], int | float):
                        raise trace.unreadable()
                    self._groups.append((group, step["min"], step["max"]))
            except DAMAGED as error:
                raise trace.unreadable() from error
        self._keys = lru_cache(KEYS)(self._read_keys)
        self._values = lru_cache(VALUES)(lambda group: self._read(group, names).combine_chunks())

    def places(self) -> list[Place]:
        """Return the layers and KV heads in the first row group of the request; maybe none."""
        for group, _, _ in self._groups:
            keys = self._keys(group)
            rows = keys["request"] == self._request
            if rows.any():
                return sorted(set(zip(keys["layer"][rows].tolist(), keys["head"][rows].tolist(), strict=True)))
        return []

    def last(self, step: int) -> int | None:
        """Return the last step up to `step` with a row of the chosen layers and heads."""
        latest = -1
        for group, first, end in sorted(self._groups, key=lambda group: min(group[2], step), reverse=True):
            if first <= step and min(end, step) > latest:
                keys = self._keys(group)
                steps = keys["step"][self._chosen(keys) & (keys["step"] <= step)]
                latest = max(latest, int(steps.max(initial=-1)))
        return latest if latest >= 0 else None

    def at(self, steps: int | Ints) -> pa.Table:
        """Return the rows of one or several steps, of the chosen layers and heads; maybe none."""
        wanted = np.unique(steps)
        pieces = []
        for group, first, end in self._groups:
            among = wanted[(wanted >= first) & (wanted <= end)]
            if not len(among):
                continue
            keys = self._keys(group)
            rows = np.flatnonzero(self._chosen(keys) & np.isin(keys["step"], among))
            if len(rows):
                begin, stop = int(rows[0]), int(rows[-1]) + 1
                pieces.append(self._values(group).slice(begin, stop - begin).take(rows - begin))
        return pa.concat_tables(pieces) if pieces else self._nothing

    def _chosen(self, keys: dict[str, Ints]) -> npt.NDArray[np.bool_]:
        chosen: npt.NDArray[np.bool_] = keys["request"] == self._request
        for name, wanted in (("layer", self.layers), ("head", self.heads)):
            if wanted is not None:
                chosen &= np.isin(keys[name], list(wanted))
        return chosen

    def _read_keys(self, group: Any) -> dict[str, Ints]:
        table = self._read(group, KEY)
        return {name: table[name].to_numpy() for name in KEY}

    def _read(self, group: Any, columns: list[str]) -> pa.Table:
        try:
            return checked(group.to_table(schema=TABLES[self._table], columns=columns), self._table)
        except DAMAGED as error:
            raise self._trace.unreadable() from error
