"""The part files of a trace's tables."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from sfi_traces.atomic_file import write_atomically
from sfi_traces.schema import PART, TABLES

# per table: what repeats is kept once; all other columns are plain
REPEATED = ("token_text", "reason", "name", "stream")
SORTED = "positions.list.element"  # the leaf of a list of ascending positions


class PartFiles:
    """Writes tables, a part after the other.

    Attributes:
        written: Rows written, by table.
    """

    def __init__(self, folder: Path, metadata: dict[str, str]) -> None:
        """Take the folder, which exists, and every file's key-value metadata."""
        self._folder, self._metadata = folder, metadata
        self._parts = dict.fromkeys(TABLES, 0)
        self.written = dict.fromkeys(TABLES, 0)

    def write(self, name: str, table: pa.Table) -> None:
        """Write a table's next part.

        Raises:
            OSError: The disk is full, say; the table is as it was.
        """
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        sink = pa.BufferOutputStream()
        parquet.write_table(
            table.replace_schema_metadata(self._metadata),
            sink,
            compression="zstd",
            use_dictionary=[column for column in REPEATED if column in table.column_names],
            column_encoding=(
                {SORTED: "DELTA_BINARY_PACKED"} if "positions" in table.column_names else None
            ),
        )
        write_atomically(folder / PART.format(number=self._parts[name]), sink.getvalue())
        self._parts[name] += 1
        self.written[name] += len(table)
