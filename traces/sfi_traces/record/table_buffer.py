"""Rows of one table that wait for their part file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sfi_traces.overlap import Ints

ROW_BYTES = 512  # what a row of Python values takes, about

Chunk = tuple[int, Mapping[str, Any]]  # how many rows, and their columns


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists.

    Attributes:
        values: The values of all lists, one after the other.
        sizes: The number of values in each list.
    """

    values: npt.NDArray[Any]
    sizes: Ints

    @classmethod
    def of(cls, values: npt.NDArray[Any], kept: npt.NDArray[np.bool_]) -> Self:
        """Make a list of each row of [N, K] values, of those that are kept."""
        return cls(values[kept], kept.sum(1))

    @property
    def nbytes(self) -> int:
        """Bytes of the values and sizes."""
        return self.values.nbytes + self.sizes.nbytes


class TableBuffer:
    """Takes rows one by one or many as columns, and gives them as a table; a table has one kind only.

    Attributes:
        nbytes: Bytes of the waiting rows, about.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Sequence[Any]] = []
        self._chunks: list[Chunk] = []
        self.nbytes = 0

    def add_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Take rows, their values in the schema's order."""
        self._rows += rows
        self.nbytes += ROW_BYTES * len(rows)

    def add_columns(self, rows: int, columns: Mapping[str, Any]) -> None:
        """Take many rows; a column is an array, in which NaN is null, `Lists`, or one value for all."""
        self._chunks.append((rows, columns))
        self.nbytes += sum(getattr(column, "nbytes", 8) for column in columns.values())

    def take(self) -> pa.Table:
        """Return the waiting rows as a table, and forget them."""
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(*pair) for pair in zip(columns, self._schema.types, strict=True)]
        else:
            arrays = [_joined(self._chunks, field.name, field.type) for field in self._schema]
        self._rows, self._chunks, self.nbytes = [], [], 0
        return pa.Table.from_arrays(arrays, schema=self._schema)


def _joined(chunks: list[Chunk], name: str, kind: pa.DataType) -> pa.Array:
    columns = [column[name] for _, column in chunks]
    if columns and isinstance(columns[0], Lists):
        sizes = np.concatenate([column.sizes for column in columns])
        values = pa.array(np.concatenate([column.values for column in columns]), kind.value_type)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, values)
    arrays = [
        column if isinstance(column, np.ndarray) else np.full(rows, column)
        for (rows, _), column in zip(chunks, columns, strict=True)
    ]
    return pa.array(np.concatenate(arrays) if arrays else (), kind, from_pandas=True)
