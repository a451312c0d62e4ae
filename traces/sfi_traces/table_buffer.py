"""Rows of one table that wait for their part file."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

ROW_BYTES = 512  # what a row of Python values takes, about


class TableBuffer:
    """Takes rows one by one, or many as columns, and gives a table.

    Attributes:
        rows: Rows taken since the trace began.
        nbytes: What those that wait take, about.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Sequence[Any]] = []
        self._batches: list[pa.RecordBatch] = []
        self.rows = self.nbytes = 0

    def add_row(self, *values: Any) -> None:
        """Take a row, in the schema's order."""
        self._rows.append(values)
        self.rows += 1
        self.nbytes += ROW_BYTES

    def add_columns(self, columns: Mapping[str, Any], rows: int) -> None:
        """Take many rows; a column is an array, a sequence or one value for all; NaN is null."""
        arrays = [_column(columns[field.name], field.type, rows) for field in self._schema]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        self._batches.append(batch)
        self.rows += rows
        self.nbytes += batch.nbytes

    def take(self) -> pa.Table:
        """Give away what waits."""
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [
                pa.array(column, field.type)
                for column, field in zip(columns, self._schema, strict=True)
            ]
            self._batches.append(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        table = pa.Table.from_batches(self._batches, self._schema).combine_chunks()
        self._rows, self._batches, self.nbytes = [], [], 0
        return table


def list_column(index: torch.Tensor, values: torch.Tensor, kind: pa.DataType) -> pa.ListArray:
    """Make a list for every row of [N, K] values, of those whose index is no padding."""
    kept = index >= 0
    offsets = np.zeros(len(index) + 1, np.int32)
    np.cumsum(kept.sum(1).numpy(), out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, pa.array(values[kept].numpy(), kind))


def _column(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    if isinstance(value, pa.Array):
        return value
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | list):
        return pa.array(value, kind, from_pandas=True)
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)
