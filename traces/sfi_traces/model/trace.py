"""Reads a trace: its manifest, its tables, and SQL over them or a part of them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import dataset

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.model.files import DAMAGED, check_part, checked, read_manifest
from sfi_traces.schema import TABLES

FETCHED = 10_000  # rows in memory at once

Place = tuple[int, int]  # layer, KV head
Row = dict[str, Any]  # of a table, a query or a document, by name


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace on disk. Whatever reads a part raises `TraceError` if it is damaged.

    Attributes:
        manifest: Provenance; `finished` is None if the run was killed.
    """

    path: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a trace; raises `TraceError` as `read_manifest` does."""
        return cls(path, read_manifest(path))

    @property
    def lossless(self) -> bool:
        """Whether the run was lossless: fast steps drafted, full attention verified."""
        return bool(self.manifest.get("lossless"))

    @property
    def redacted(self) -> bool:
        """Whether token ids and text were left out."""
        return bool(self.manifest.get("redacted"))

    @property
    def unit(self) -> str:
        """What a request is called: a "turn" of a chat."""
        return str(self.manifest.get("unit", "request"))

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        return int(self.manifest.get("ranks", 1))

    @property
    def imported(self) -> dict[str, Any] | None:
        """The manifest's entry on the imported file; None for a recorded trace."""
        return self.manifest.get("imported")

    @property
    def masses(self) -> bool:
        """Whether positions have their probability under dense attention; an import may lack it."""
        return self.imported is None or bool(self.imported["masses"])

    @property
    def reads_own_selection(self) -> bool:
        """Whether each step read its own selection: an imported indexer, whose steps are all slow."""
        return self.imported is not None and self.imported["kind"] == "selections"

    def parts(self, table: str) -> list[Path]:
        """List a table's complete part files in order."""
        return sorted((self.path / table).glob("part-*.parquet"))

    def has(self, table: str) -> bool:
        """Say whether a table has any part."""
        return bool(self.parts(table))

    def table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read a table; an empty one where the trace has none."""
        return self.rows(name, columns or TABLES[name].names)

    def rows(self, name: str, columns: list[str], where: pc.Expression | None = None) -> pa.Table:
        """Read the rows and columns that are asked for, skipping row groups that have none of them."""
        source = self.dataset(name)
        if isinstance(source, pa.Table):  # the table has no part
            return source.select(columns)
        try:
            return checked(source.to_table(columns=columns, filter=where), name)
        except DAMAGED as error:
            raise self.unreadable() from error

    def require_audit(self, *, every_step: bool = False) -> None:
        """Raise `TraceError` without supports, or with `every_step` for an audit that skips steps."""
        if self.lossless:
            raise TraceError(f"trace {self.path} must be of a plain run, recorded with --audit 1, got a lossless one")
        audit = self.manifest.get("audit")
        if not audit or not self.has("supports"):
            raise TraceError(f"trace {self.path} has no audit; record it with --audit 1")
        if every_step and audit["every"] != 1:
            raise TraceError(f"trace {self.path} audits every {audit['every']} steps; record it with --audit 1")

    def connect(self) -> duckdb.DuckDBPyConnection:
        """Open DuckDB on the tables; it reads what a query needs, and can touch no file."""
        connection = duckdb.connect()
        for name in TABLES:
            # read by Arrow: if DuckDB may open files, COPY may overwrite them
            connection.register(name, self.dataset(name))
        connection.execute("SET enable_external_access = false; SET lock_configuration = true")
        return connection

    def dataset(self, name: str) -> Any:
        """Return a table that is read lazily; an empty one where the trace has none."""
        parts = self.parts(name)
        for part in parts:
            try:
                check_part(part, name)
            except DAMAGED as error:
                raise self.unreadable() from error
        files, schema = [str(part) for part in parts], TABLES[name]
        return dataset.dataset(files, schema, format="parquet") if files else schema.empty_table()

    def scan(
        self, connection: duckdb.DuckDBPyConnection, query: str, parameters: list[Any] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows that a query finds in the tables of `connect`."""
        try:
            result = connection.execute(query, parameters)
            names = [column[0] for column in result.description]
            while rows := result.fetchmany(FETCHED):
                for row in rows:
                    yield dict(zip(names, row, strict=True))
        except duckdb.InvalidInputException as error:  # raised where Arrow cannot read
            raise self.unreadable() from error

    def unreadable(self) -> TraceError:
        """Return the error of a trace with a damaged part."""
        return TraceError(f"trace {self.path} has a damaged part; `sfi trace check {self.path}` names it")


def check_known(name: str, values: Collection[int | None], known: Collection[int]) -> None:
    """Raise `ConfigError` for a value that a trace does not have; None is no value."""
    ordered = sorted(known)
    whole = len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1))
    for value in values:
        if value is not None and value not in known:
            among = f"{ordered[0]} to {ordered[-1]}" if whole else ordered
            raise ConfigError(f"{name} must be one of {among}, got {value}")


def rows_of(request: int, layer: int | None = None, head: int | None = None) -> pc.Expression:
    """Make a filter for the rows of a request, and optionally of a layer or KV head."""
    wanted = pc.field("request") == request
    for name, value in (("layer", layer), ("head", head)):
        if value is not None:
            wanted &= pc.field(name) == value
    return wanted


def of_steps(steps: np.ndarray) -> pc.Expression:
    """Make a filter for the rows of some steps; its range lets readers skip row groups."""
    at, among = pc.field("step"), pa.array(np.unique(steps), pa.int32())
    if not len(among):
        return pc.scalar(False)
    return (at >= among[0]) & (at <= among[-1]) & at.isin(among)


def distribution(column: str) -> str:
    """Write the SQL of a column's distribution, without nulls, NaN and infinities."""
    value = f"CASE WHEN isfinite({column}) THEN {column}::DOUBLE END"
    p5, p50, p95 = (f"quantile_cont({value}, {share})" for share in (0.05, 0.5, 0.95))
    return (
        f"{{'n': count({value}), 'mean': avg({value}), 'sd': stddev_samp({value}),"
        f" 'p5': {p5}, 'p50': {p50}, 'p95': {p95}, 'min': min({value}), 'max': max({value})}}"
    )


def bins(column: str, name: str) -> str:
    """Write the SQL of a whole number's bin, of 1, 2, 3-4, 5-8, ..., as columns `from_NAME` and `to_NAME`."""
    first = f"CASE WHEN {column} <= 2 THEN {column} ELSE 2 ** (ceil(log2({column})) - 1) + 1 END"
    last = f"CASE WHEN {column} <= 2 THEN {column} ELSE 2 ** ceil(log2({column})) END"
    return f"({first})::INT AS from_{name}, ({last})::INT AS to_{name}"
