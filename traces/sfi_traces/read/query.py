"""SQL queries over a trace's tables."""

from collections.abc import Iterator
from typing import Any

import duckdb

from sfi_core.errors import ConfigError
from sfi_traces.model.trace import Trace

ROWS = 1000  # fetched at once


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
