"""Writes the rows of a table or of an SQL query as CSV or JSON, in pieces: a large trace is never whole in memory."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import duckdb

from sfi_core.errors import ConfigError
from sfi_core.machine.text import write_json
from sfi_traces.model.files import DAMAGED
from sfi_traces.model.trace import Trace
from sfi_traces.schema import TABLES

ROWS = 1000  # in memory at once

Rows = Sequence[Sequence[Any]]


def table_text(trace: Trace, name: str, form: str, progress: Callable[[int, int], None]) -> Iterator[str]:
    """Write a table as "csv" or "jsonl"; `progress` is told the rows so far, and in all."""
    write = csv_text if form == "csv" else jsonl_text
    return write(TABLES[name].names, _table_rows(trace, name, progress))


def _table_rows(trace: Trace, name: str, progress: Callable[[int, int], None]) -> Iterator[Rows]:
    columns, done = TABLES[name].names, 0
    data = trace.dataset(name)
    total = data.count_rows() if trace.has(name) else 0
    try:
        for batch in data.to_batches(batch_size=ROWS, fragment_readahead=1) if total else ():
            yield list(zip(*(batch[column].to_pylist() for column in columns), strict=True))
            done += len(batch)
            progress(done, total)
    except DAMAGED as error:
        raise trace.unreadable() from error


def csv_text(columns: Sequence[str], batches: Iterable[Rows]) -> Iterator[str]:
    """Write rows as CSV with a header; a null is empty, lists and booleans are JSON."""
    for rows in chain([[columns]], batches):
        file = io.StringIO()
        csv.writer(file, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
        yield file.getvalue()


def jsonl_text(columns: Sequence[str], batches: Iterable[Rows]) -> Iterator[str]:
    """Write one JSON object a line."""
    for rows in batches:
        yield "".join(f"{line}\n" for line in _objects(columns, rows))


def json_text(columns: Sequence[str], batches: Iterable[Rows]) -> Iterator[str]:
    """Write one JSON document: the columns' names, and an object for each row."""
    yield f'{{"columns": {write_json(list(columns))}, "rows": ['
    between = "\n"
    for rows in batches:
        for line in _objects(columns, rows):
            yield between + line
            between = ",\n"
    yield "\n]}\n"


def _objects(columns: Sequence[str], rows: Rows) -> Iterator[str]:
    for row in rows:
        yield _json(dict(zip(columns, row, strict=True)))


def _json(value: Any) -> str:
    try:  # the fast way, which nearly always works
        return write_json(value, allow_nan=False)
    except (TypeError, ValueError):
        return write_json(_plain(value))


def _plain(value: Any) -> Any:
    # a DuckDB value as one that JSON has; NaN and infinities become null
    if isinstance(value, float | Decimal):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(name): _plain(entry) for name, entry in value.items()}
    return value if value is None or isinstance(value, str | int) else str(value)


def _cell(value: Any) -> Any:
    return _json(value) if isinstance(value, bool | list | tuple | dict) else value


class Query:
    """A query and its rows; it reads the tables of one trace and no file."""

    def __init__(self, trace: Trace, sql: str) -> None:
        """Run the query; raises `ConfigError` in DuckDB's words if it refuses."""
        self._connection = trace.connect()
        try:
            if not self._connection.extract_statements(sql):
                raise ConfigError("query must be a statement of SQL, got an empty one")
            self._connection.execute(sql)
        except duckdb.Error as error:
            raise _refused(error) from error
        self.columns: list[str] = [column[0] for column in self._connection.description or ()]

    def batches(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows, some at a time; raises `ConfigError` if the query fails on the way."""
        while self.columns:
            try:
                rows = self._connection.fetchmany(ROWS)
            except duckdb.Error as error:
                raise _refused(error) from error
            if not rows:
                return
            yield rows


def _refused(error: duckdb.Error) -> ConfigError:
    # after the first empty line DuckDB repeats the query
    words = str(error).split("\n\n")[0].split()
    return ConfigError(f"query fails: {' '.join(words)}")
