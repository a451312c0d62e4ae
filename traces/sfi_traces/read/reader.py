"""Reading a trace: its manifest, its tables, and DuckDB over them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa
from pyarrow import dataset, parquet

from sfi_core.errors import TraceError
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION, TABLES

REQUIRED = ("finished", "model", "policy", "config", "trigger_token_ids")  # of a manifest
FETCHED = 10_000  # rows in memory at once


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace on disk.

    Attributes:
        path: Folder of the trace.
        manifest: Provenance; `finished` is None when the run was killed.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a trace.

        Raises:
            TraceError: No trace, a damaged one, or one of a newer schema.
        """
        file = path / MANIFEST
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["schema_version"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise TraceError(f"{path} is not a trace: it has no {MANIFEST}") from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TraceError(f"trace {path} has an unreadable {MANIFEST}: {error}") from error
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise TraceError(
                f"trace {path} has schema {version}, this sfi reads 1 to {SCHEMA_VERSION}; upgrade sfi"
            )
        if missing := [key for key in REQUIRED if key not in manifest]:
            raise TraceError(f"trace {path} has a {MANIFEST} without {', '.join(missing)}")
        return cls(path, manifest)

    @property
    def lossless(self) -> bool:
        """Whether sparse steps drafted only, and full attention verified; older traces are of plain runs."""
        return bool(self.manifest.get("lossless"))

    @property
    def redacted(self) -> bool:
        """Whether token ids and text were left out."""
        return bool(self.manifest.get("redacted"))

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
        schema = TABLES[name]
        pieces = []
        for part in self.parts(name):
            try:
                # an older trace has nulls where the schema has a newer column
                piece = parquet.read_table(part, columns=columns, schema=schema)
            except (OSError, pa.ArrowException) as error:
                raise self.damaged(part) from error
            pieces.append(piece)
        wanted = schema if columns is None else pa.schema([schema.field(c) for c in columns])
        return pa.concat_tables(pieces) if pieces else wanted.empty_table()

    def require_audit(self, *, every_step: bool = False) -> None:
        """Refuse a trace without supports, such as a lossless run's; with `every_step`, one with gaps.

        Raises:
            TraceError: Naming the option that records them.
        """
        if self.lossless:
            raise TraceError(
                f"trace {self.path} must be of a plain run, recorded with --audit 1, got a lossless one"
            )
        audit = self.manifest.get("audit")
        if not audit or not self.has("supports"):
            raise TraceError(f"trace {self.path} has no audit; record it with --audit 1")
        if every_step and audit["every"] != 1:
            raise TraceError(
                f"trace {self.path} audits every {audit['every']} steps; record it with --audit 1"
            )

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Open DuckDB on the tables by name, read as a query needs them; it can touch no file.

        Raises:
            TraceError: A part is truncated.
        """
        connection = duckdb.connect()
        for name in TABLES:
            # Arrow's reader and not DuckDB's: a file that DuckDB may read, COPY may overwrite
            connection.register(name, self.dataset(name))
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        return connection

    def dataset(self, name: str) -> Any:
        """Return a table for DuckDB, read as a query needs it; an empty one where the trace has none.

        Raises:
            TraceError: A part is truncated.
        """
        parts = self.parts(name)
        for part in parts:
            try:
                parquet.read_metadata(part)
            except (OSError, pa.ArrowException) as error:
                raise self.damaged(part) from error
        files, schema = [str(part) for part in parts], TABLES[name]
        return dataset.dataset(files, schema, format="parquet") if files else schema.empty_table()

    def scan(
        self, connection: duckdb.DuckDBPyConnection, query: str, parameters: list[Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield what a query of ours finds in the tables of `connect`, row by row.

        Raises:
            TraceError: A part is damaged in its middle.
        """
        try:
            found = connection.execute(query, parameters)
            names = [column[0] for column in found.description]
            while rows := found.fetchmany(FETCHED):
                for row in rows:
                    yield dict(zip(names, row, strict=True))
        except duckdb.InvalidInputException as error:  # DuckDB's word for what Arrow could not read
            raise self._unreadable() from error

    def batches(
        self, connection: duckdb.DuckDBPyConnection, query: str, rows: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield what a query of ours finds as Arrow's batches of at most so many rows; one at least.

        Raises:
            TraceError: A part is damaged in its middle.
        """
        try:
            found: pa.RecordBatchReader = connection.sql(query).to_arrow_reader(rows)
            yield pa.RecordBatch.from_pylist([], found.schema)
            yield from found
        except (duckdb.InvalidInputException, OSError) as error:
            raise self._unreadable() from error

    def _unreadable(self) -> TraceError:
        return TraceError(
            f"trace {self.path} has a damaged part; `sfi trace check {self.path}` names it"
        )

    def damaged(self, part: Path) -> TraceError:
        """Return the error of a part that cannot be read."""
        return TraceError(
            f"trace part {part} cannot be read; `sfi trace check {self.path}` lists what is sound"
        )
