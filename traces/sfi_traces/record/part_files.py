"""Rows of a trace's tables that wait for their part file, and the part files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from sfi_core.machine.files import write_atomically
from sfi_traces.overlap import Ints
from sfi_traces.schema import PART, POSITIONS, TABLES

ROW_BYTES = 512  # estimate for a row of Python values

Chunk = tuple[int, Mapping[str, Any]]  # number of rows, columns


@dataclass(frozen=True, slots=True)
class Lists:
    """A column of lists: their values one after the other, and each list's size."""

    values: npt.NDArray[Any]
    sizes: Ints

    @classmethod
    def of(cls, values: npt.NDArray[Any], kept: npt.NDArray[np.bool_]) -> Self:
        """Make a list of the kept values of each row of [N, K]."""
        return cls(values[kept], kept.sum(1))

    @property
    def nbytes(self) -> int:
        """Bytes of values and sizes."""
        return self.values.nbytes + self.sizes.nbytes


class TableBuffer:
    """Collects rows, one by one or as columns, and gives them as a table of about `nbytes`."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._rows: list[Sequence[Any]] = []
        self._chunks: list[Chunk] = []
        self._tables: list[pa.Table] = []
        self.nbytes = 0

    def add_rows(self, rows: Sequence[Sequence[Any]]) -> None:
        """Add rows; their values are in the schema's order."""
        self._rows += rows
        self.nbytes += ROW_BYTES * len(rows)

    def add_columns(self, rows: int, columns: Mapping[str, Any]) -> None:
        """Add many rows; a column is an array (NaN is null), `Lists`, or one value for all rows."""
        self._chunks.append((rows, columns))
        self.nbytes += sum(getattr(column, "nbytes", 8) for column in columns.values())

    def add_table(self, rows: pa.Table) -> None:
        """Add rows that `take` of this buffer, or of another rank's, has given."""
        self._tables.append(rows)
        self.nbytes += rows.nbytes

    def take(self) -> pa.Table:
        """Return the waiting rows as a table, those of `add_table` first, and forget them."""
        if self._rows:
            columns = zip(*self._rows, strict=True)
            arrays = [pa.array(*pair) for pair in zip(columns, self._schema.types, strict=True)]
        else:
            arrays = [_joined(self._chunks, field.name, field.type) for field in self._schema]
        tables = [*self._tables, pa.Table.from_arrays(arrays, schema=self._schema)]
        self._rows, self._chunks, self._tables, self.nbytes = [], [], [], 0
        return pa.concat_tables(tables).combine_chunks() if len(tables) > 1 else tables[0]


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


class PartFiles:
    """Writes the tables of a trace, part by part; `written` counts the rows of each table."""

    def __init__(self, folder: Path, metadata: dict[str, str]) -> None:
        """Write to an existing folder; `metadata` goes into every file."""
        self._folder, self._metadata = folder, metadata
        self._parts = dict.fromkeys(TABLES, 0)
        self.written = dict.fromkeys(TABLES, 0)

    def flush(self, tables: Mapping[str, TableBuffer]) -> None:
        """Write the waiting rows, `steps` last, so that a recorded step has its other rows too."""
        for name, buffer in sorted(tables.items(), key=lambda item: item[0] == "steps"):
            table = buffer.take()
            if len(table):
                self.write(name, table)

    def write(self, name: str, table: pa.Table) -> None:
        """Write a table's next part; an OSError leaves the parts before as they were."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        sink = pa.BufferOutputStream()
        with parquet.ParquetWriter(
            sink,
            table.schema,
            compression="zstd",
            write_page_checksum=True,  # for `sfi trace check`
            use_dictionary=[field.name for field in table.schema if field.type == pa.string()],
            column_encoding=_encoding(table.schema),
            store_schema=False,  # types survive without it, and it can outweigh a small part
        ) as writer:
            writer.write_table(table)
            writer.add_key_value_metadata(self._metadata)
        write_atomically(folder / PART.format(number=self._parts[name]), sink.getvalue())
        self._parts[name] += 1
        self.written[name] += len(table)


def _encoding(schema: pa.Schema) -> dict[str, str]:
    # integers and positions mostly grow; masses differ least in their exponents
    encoding = {}
    for field in schema:
        if pa.types.is_integer(field.type):
            encoding[field.name] = "DELTA_BINARY_PACKED"
        elif field.type == POSITIONS:
            encoding[f"{field.name}.list.element"] = "DELTA_BINARY_PACKED"
        elif pa.types.is_list(field.type) and pa.types.is_floating(field.type.value_type):
            encoding[f"{field.name}.list.element"] = "BYTE_STREAM_SPLIT"
    return encoding
