"""SQL over a trace's tables, from outside."""

from collections.abc import Iterator
from typing import Any

import duckdb

from sfi_core.errors import ConfigError
from sfi_traces.read.reader import Trace

ROWS = 1000  # fetched at once


class Query:
    """A query and its rows; a query reads the tables of one trace and no file.

    Attributes:
        columns: Names of the columns.
    """

    def __init__(self, trace: Trace, sql: str) -> None:
        """Run it.

        Raises:
            ConfigError: DuckDB's words on what is wrong with it.
            TraceError: A part is truncated.
        """
        self._connection = trace.connect()
        try:
            if not self._connection.extract_statements(sql):
                raise ConfigError("query must be a statement of SQL, got an empty one")
            self._connection.execute(sql)
        except duckdb.Error as error:
            raise _refused(error) from error
        self.columns: list[str] = [column[0] for column in self._connection.description or ()]

    def batches(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows, some at a time.

        Raises:
            ConfigError: DuckDB's words on what went wrong on the way.
        """
        while self.columns:
            try:
                rows = self._connection.fetchmany(ROWS)
            except duckdb.Error as error:
                raise _refused(error) from error
            if not rows:
                return
            yield rows


def _refused(error: duckdb.Error) -> ConfigError:
    # what comes after the first empty line repeats the query
    words = str(error).split("\n\n")[0].split()
    return ConfigError(f"query fails: {' '.join(words)}")
