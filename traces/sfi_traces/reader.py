"""Reading a trace: its manifest, its tables, and DuckDB views of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa
from pyarrow import parquet

from sfi_core.errors import TraceError
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION, TABLES


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace on disk.

    Attributes:
        path: Its folder.
        manifest: Provenance; `finished` is None when the run was killed.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a trace.

        Raises:
            TraceError: No trace, or one of a newer schema.
        """
        file = path / MANIFEST
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["schema_version"]
        except FileNotFoundError as error:
            raise TraceError(f"{path} is not a trace: it has no {MANIFEST}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"trace {path} has an unreadable {MANIFEST}: {error}") from error
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise TraceError(
                f"trace {path} has schema {version}, this sfi reads 1 to {SCHEMA_VERSION}; upgrade sfi"
            )
        return cls(path, manifest)

    def parts(self, table: str) -> list[Path]:
        """List a table's complete part files, in order."""
        return sorted((self.path / table).glob("part-*.parquet"))

    def has(self, table: str) -> bool:
        """Say whether a table has any part."""
        return bool(self.parts(table))

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read a table; an empty one where the trace has none.

        Raises:
            TraceError: A part is damaged.
        """
        pieces = []
        for part in self.parts(name):
            try:
                pieces.append(parquet.read_table(part, columns=columns))
            except (OSError, pa.ArrowException) as error:
                raise TraceError(
                    f"trace part {part} cannot be read; `sfi trace check {self.path}` lists what is sound"
                ) from error
        schema = TABLES[name]
        wanted = schema if columns is None else pa.schema([schema.field(c) for c in columns])
        return pa.concat_tables(pieces) if pieces else wanted.empty_table()

    def require_audit(self, *, every_step: bool = False) -> None:
        """Refuse a trace without supports; with `every_step`, one that lacks some steps'.

        Raises:
            TraceError: Naming the option that records them.
        """
        audit = self.manifest.get("audit")
        if not audit or not self.has("supports"):
            raise TraceError(f"trace {self.path} has no audit; record it with --audit 1")
        if every_step and audit["every"] != 1:
            raise TraceError(
                f"trace {self.path} audits every {audit['every']} steps; record it with --audit 1"
            )

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Open DuckDB with a view of each table, by name."""
        connection = duckdb.connect()
        for name in TABLES:
            connection.register(name, self.table(name))
        return connection
