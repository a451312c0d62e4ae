"""`sfi trace sql`: SQL over a trace's tables."""

from typing import Annotated

import typer

from sfi_cli import options as o


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
    from sfi_cli.commands.trace.sql_views import FORMATS, query_pieces
    from sfi_cli.terminal.output import Output
    from sfi_core.errors import ConfigError
    from sfi_traces.model.trace import Trace

    form = "json" if json else form
    if form not in FORMATS:
        raise ConfigError(f"unknown format {form!r}; expected one of {FORMATS}")
    pieces = query_pieces(Trace.open(folder), query, form)
    with Output(output, force=force) as written:
        written.pieces(pieces)
