"""Reads the rows of single steps of a long table, through the row groups that may hold them."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from sfi_traces.model.files import DAMAGED, checked, open_part
from sfi_traces.model.trace import Place, Trace
from sfi_traces.overlap import Ints
from sfi_traces.schema import TABLES

KEYS, VALUES = 4, 2  # row groups whose keys and whose columns are cached
KEY = ("request", "step", "layer", "head")

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a part; `request` and `step` are ranges from its statistics."""

    part: Path
    index: int
    request: Range
    step: Range


class Rows:
    """One request's rows of a table with layer and KV head, found by step.

    The keys of at most 4 row groups and the columns of 2 stay in memory; a recorded row group has at most 64 MiB.
    `layers` and `heads` limit the rows that are wanted; None for all.
    """

    def __init__(self, trace: Trace, table: str, request: int, columns: Collection[str]) -> None:
        """Read the footers of the parts, and no row; raises `TraceError` for a truncated part."""
        self.layers: Collection[int] | None = None
        self.heads: Collection[int] | None = None
        self._trace, self._table, self._request, self._columns = trace, table, request, list(columns)
        self._groups = [
            group
            for part in trace.parts(table)
            for group in _row_groups(trace, part)
            if group.request[0] <= request <= group.request[1]
        ]
        self._nothing = TABLES[table].empty_table().select(self._columns)
        self._keys = lru_cache(KEYS)(self._read_keys)
        self._values = lru_cache(VALUES)(lambda group: self._read(group, self._columns).combine_chunks())

    def places(self) -> list[Place]:
        """Return the layers and KV heads in the first row group of the request; maybe none."""
        for group in self._groups:
            keys = self._keys(group)
            rows = keys["request"] == self._request
            if rows.any():
                return sorted(set(zip(keys["layer"][rows].tolist(), keys["head"][rows].tolist(), strict=True)))
        return []

    def last(self, step: int) -> int | None:
        """Return the last step up to `step` with a row of the chosen layers and heads."""
        latest: int | None = None
        for group in sorted(self._groups, key=lambda group: min(group.step[1], step), reverse=True):
            if group.step[0] > step:
                continue
            if latest is not None and min(group.step[1], step) <= latest:
                break
            keys = self._keys(group)
            steps = keys["step"][self._chosen(keys) & (keys["step"] <= step)]
            if len(steps):
                latest = max(int(steps.max()), -1 if latest is None else latest)
        return latest

    def at(self, steps: int | Ints) -> pa.Table:
        """Return the rows of one or several steps, of the chosen layers and heads; maybe none."""
        wanted = np.unique(steps)
        pieces = []
        for group in self._groups:
            among = wanted[(wanted >= group.step[0]) & (wanted <= group.step[1])]
            if not len(among):
                continue
            keys = self._keys(group)
            rows = np.flatnonzero(self._chosen(keys) & np.isin(keys["step"], among))
            if len(rows):
                first, end = int(rows[0]), int(rows[-1]) + 1
                pieces.append(self._values(group).slice(first, end - first).take(rows - first))
        return pa.concat_tables(pieces) if pieces else self._nothing

    def _chosen(self, keys: dict[str, Ints]) -> npt.NDArray[np.bool_]:
        chosen: npt.NDArray[np.bool_] = keys["request"] == self._request
        for name, wanted in (("layer", self.layers), ("head", self.heads)):
            if wanted is not None:
                chosen &= np.isin(keys[name], list(wanted))
        return chosen

    def _read_keys(self, group: RowGroup) -> dict[str, Ints]:
        table = self._read(group, list(KEY))
        return {name: table[name].to_numpy() for name in KEY}

    def _read(self, group: RowGroup, columns: list[str]) -> pa.Table:
        try:
            with parquet.ParquetFile(group.part) as file:
                rows = file.read_row_group(group.index, columns=columns)
                kinds = pa.schema([TABLES[self._table].field(name) for name in rows.column_names])
                return checked(rows.cast(kinds), self._table)  # another writer may have other types
        except DAMAGED as error:
            raise self._trace.damaged(group.part) from error


def _row_groups(trace: Trace, part: Path) -> list[RowGroup]:
    try:
        metadata = open_part(part)
    except DAMAGED as error:
        raise trace.damaged(part) from error
    groups = []
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        columns = [group.column(at) for at in range(metadata.num_columns)]
        ranges = {column.path_in_schema: _range(column) for column in columns}
        groups.append(RowGroup(part, index, ranges["request"], ranges["step"]))
    return groups


def _range(column: Any) -> Range:
    bounds = column.statistics  # another writer may leave them out
    known = bounds is not None and bounds.has_min_max and isinstance(bounds.min, int)
    return (bounds.min, bounds.max) if known else (-np.inf, np.inf)
