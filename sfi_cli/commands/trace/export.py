"""`sfi trace export` and `sfi trace sql`: a trace, or a query's rows, for other programs."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.commands.trace.report import beside, make_folder
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError, unknown
from sfi_core.machine.text import printable
from sfi_traces.views.table import Table

TIMELINE = "perfetto"  # of the whole trace, in one file
FORMATS = (TIMELINE, "csv", "jsonl")
OF_A_QUERY = ("table", "csv", "json")
MOST_ROWS = 1000
LONGEST = 80  # characters of a cell


def export(
    folder: o.TraceDir,
    form: Annotated[str, o.option(o.OUTPUT, "perfetto, csv or jsonl.", "--format")],
    table: Annotated[o.Text, o.option(o.OUTPUT, "Only this table, of csv and jsonl.", shown="all")] = None,
    output: Annotated[o.File, o.output("Write there instead.", shown="stdout; or DIR-timeline.json.gz")] = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> None:
    """Write a trace as a timeline for ui.perfetto.dev, or as CSV or JSON lines.

    Without --table, each table is a file in a folder; a list is written as JSON. A file that ends in .gz is
    compressed; ui.perfetto.dev opens such a file. On a terminal, a timeline goes into one beside the trace.

    For example:

      sfi trace export run --format perfetto

      sfi trace export run --format csv -o tables

      sfi trace export run --format jsonl --table steps
    """
    from sfi_cli.terminal.progress import Progress
    from sfi_traces.export import table_text
    from sfi_traces.export.perfetto import perfetto_text
    from sfi_traces.model.trace import Trace
    from sfi_traces.schema import TABLES

    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if table is not None and form == TIMELINE:
        raise ConfigError(f"table must come with --format csv or jsonl, got {form}")
    if table is not None and table not in TABLES:
        raise unknown("table", table, TABLES)
    if form == TIMELINE and output is None and sys.stdout.isatty():
        output = beside(folder, "timeline.json.gz")
    paths: dict[str | None, Path | None] = {table: output}
    if table is None and form != TIMELINE:
        if output is None:
            raise ConfigError(f"{form} of all tables must have a folder; add -o FOLDER or --table NAME")
        paths = {name: output / f"{name}.{form}" for name in TABLES}
    trace = Trace.open(folder)
    if output is not None and len(paths) > 1:
        make_folder(output)
    with Progress(quiet=quiet) as progress, ExitStack() as stack:
        # open all files first, so that a file that exists stops the export before anything is written
        files = {name: stack.enter_context(Output(path, force=force)) for name, path in paths.items()}
        for name, file in files.items():
            show = partial(progress.update, f"exporting {name or 'the timeline'}")
            pieces = perfetto_text(trace, show) if name is None else table_text(trace, name, form, show)
            file.pieces(pieces, stack)
    for path in filter(None, paths.values()):
        message(f"Wrote {path}")


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
    from sfi_traces.export import Query, csv_text, json_text
    from sfi_traces.model.trace import Trace

    form = "json" if json else form
    if form not in OF_A_QUERY:
        raise unknown("format", form, OF_A_QUERY)
    trace = Trace.open(folder)
    with Output(output, force=force) as written:
        result = Query(trace, query)
        name, times = max(Counter(result.columns).items(), key=lambda pair: pair[1], default=("", 0))
        if form == "json" and times > 1:
            raise ConfigError(f"columns must differ in name, got {name!r} {times} times; use AS")
        if form == "table":
            written.data({}, lambda _: [_table(result.columns, result.batches())])
        else:
            written.pieces({"csv": csv_text, "json": json_text}[form](result.columns, result.batches()))


def _table(columns: list[str], batches: Iterator[list[tuple[Any, ...]]]) -> Table:
    rows = chain.from_iterable(batches)
    shown = [[_cell(value) for value in row] for row in islice(rows, MOST_ROWS)]
    if next(rows, None) is not None:
        message(f"only the first {MOST_ROWS:,} rows; --format csv or json writes all")
    return Table("", columns, shown, left=len(columns))


def _cell(value: object) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else "" if value is None else printable(str(value))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
