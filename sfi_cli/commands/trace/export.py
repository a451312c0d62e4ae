"""`sfi trace export`: a trace for other programs."""

import sys
from typing import Annotated

from sfi_cli import options as o
from sfi_cli.commands.trace.report import beside
from sfi_cli.terminal.output import Output
from sfi_core.errors import ConfigError, unknown

TIMELINE = "perfetto"  # of the whole trace, in one file
FORMATS = (TIMELINE, "csv", "jsonl")


def export(
    folder: o.TraceDir,
    form: Annotated[str, o.option(o.OUTPUT, "perfetto, csv or jsonl.", "--format")],
    table: Annotated[str | None, o.option(o.OUTPUT, "The table, of csv and jsonl.", shown="none")] = None,
    output: Annotated[
        o.File,
        o.output(
            "Write there instead.",
            shown="stdout; on a terminal the timeline goes to DIR-timeline.json.gz beside the trace",
        ),
    ] = None,
    force: o.Force = False,
    quiet: o.Quiet = False,
) -> None:
    """Write a trace as a timeline for ui.perfetto.dev, or a table as CSV or JSON lines.

    A list is written as JSON. A file that ends in .gz is compressed; ui.perfetto.dev opens such a file.

    For example:

      sfi trace export run --format perfetto

      sfi trace export run --format csv --table steps -o steps.csv
    """
    from sfi_cli.terminal.progress import BenchProgress
    from sfi_traces.export.perfetto import perfetto_text
    from sfi_traces.export.rows import Query, csv_text, jsonl_text
    from sfi_traces.model.trace import Trace
    from sfi_traces.schema import TABLES

    if form not in FORMATS:
        raise unknown("format", form, FORMATS)
    if (table is None) != (form == TIMELINE):
        raise ConfigError(f"table must come with --format csv or jsonl, and only there, got {table or 'none'}")
    if table is not None and table not in TABLES:
        raise unknown("table", table, TABLES)
    if form == TIMELINE and output is None and sys.stdout.isatty():
        output = beside(folder, "timeline.json.gz")
    trace = Trace.open(folder)
    with BenchProgress(quiet=quiet) as progress, Output(output, force=force, quiet=quiet) as file:
        if table is None:
            file.pieces(perfetto_text(trace, lambda *done: progress.update("exporting the timeline", *done)))
        else:
            try:
                rows = Query(trace, f"FROM {table}")
                file.pieces((csv_text if form == "csv" else jsonl_text)(rows.columns, rows.batches()))
            except ConfigError as error:  # the query is ours
                raise trace.unreadable() from error
