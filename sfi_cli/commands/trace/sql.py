"""`sfi trace sql`: SQL over a trace's tables."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError, unknown
from sfi_traces.views.table import Table

FORMATS = ("table", "csv", "json")
MOST_ROWS = 1000
LONGEST = 80  # characters of a cell

Rows = Iterator[list[tuple[Any, ...]]]


def sql(
    folder: o.TraceDir,
    query: Annotated[str, typer.Argument(help="A statement of DuckDB's SQL.", metavar="SQL")],
    form: Annotated[str, o.option(o.OUTPUT, "table, csv or json.", "--format")] = "table",
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Query the tables of a trace; a query cannot change the trace.

    The tables are prompts, steps, verifications, selections, recalls, supports, logits and timings.
    `SHOW TABLES` lists them, `DESCRIBE steps` shows a table's columns.

    For example:

      sfi trace sql run "SELECT reason, count(*) FROM steps GROUP BY reason"

      sfi trace sql run "FROM supports SELECT avg(retained_mass) GROUP BY layer" --format csv -o mass.csv
    """
    from sfi_traces.export.rows import Query, csv_text, json_text
    from sfi_traces.model.trace import Trace

    form = "json" if json else form
    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    trace = Trace.open(folder)
    with Output(output, force=force) as written:
        found = Query(trace, query)
        name, times = max(Counter(found.columns).items(), key=lambda pair: pair[1], default=("", 0))
        if form == "json" and times > 1:
            raise ConfigError(f"columns must differ in name, got {name!r} {times} times; use AS")
        if form == "table":
            written.data({}, lambda _: [_table(found.columns, found.batches())])
        else:
            written.pieces({"csv": csv_text, "json": json_text}[form](found.columns, found.batches()))


def _table(columns: list[str], batches: Rows) -> Table:
    rows = chain.from_iterable(batches)
    shown = [[_cell(value) for value in row] for row in islice(rows, MOST_ROWS)]
    if next(rows, None) is not None:
        message(f"only the first {MOST_ROWS:,} rows; --format csv or json writes all")
    return Table("", columns, shown, left=len(columns))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.9g}"
    text = "" if value is None else str(value)
    if not text.isprintable():  # a newline would break the table's line
        text = repr(text)[1:-1]
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
