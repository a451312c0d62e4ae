"""The rows of `sfi trace sql` as a table, CSV or JSON."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from sfi_cli.terminal.output import message
from sfi_cli.terminal.tables import rendered, table
from sfi_core.errors import ConfigError

FORMATS = ("table", "csv", "json")
MOST_ROWS = 1000
LONGEST = 80  # characters of a cell


def query_pieces(trace: Any, sql: str, form: str) -> Iterator[str]:
    """Run a query and write its rows, piece by piece.

    Raises:
        ConfigError: The query is refused, or for JSON two columns have one name.
        TraceError: A part is truncated.
    """
    from sfi_traces.export.rows import csv_text, json_text
    from sfi_traces.read.query import Query

    query = Query(trace, sql)
    if form == "csv":
        yield from csv_text(query.columns, query.batches())
    elif form == "json":
        name, times = max(Counter(query.columns).items(), key=lambda pair: pair[1], default=("", 0))
        if times > 1:
            raise ConfigError(f"columns must differ in name, got {name!r} {times} times; use AS")
        yield from json_text(query.columns, query.batches())
    else:
        yield _table_text(query.columns, query.batches())


def _table_text(columns: list[str], batches: Iterator[list[tuple[Any, ...]]]) -> str:
    rows = chain.from_iterable(batches)
    shown = [[_cell(value) for value in row] for row in islice(rows, MOST_ROWS)]
    if next(rows, None) is not None:
        message(f"only the first {MOST_ROWS:,} rows; --format csv or json writes all")
    return rendered([table("", columns, shown, left=len(columns))])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = "" if value is None else str(value)
    text = (
        text if text.isprintable() else repr(text)[1:-1]
    )  # a newline would break the table's line
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
