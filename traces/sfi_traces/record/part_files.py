"""The part files of a trace's tables."""

from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from sfi_core.machine.files import write_atomically
from sfi_traces.record.table_buffer import TableBuffer
from sfi_traces.schema import PART, POSITIONS, TABLES


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
