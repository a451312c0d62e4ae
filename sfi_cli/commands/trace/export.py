"""`sfi trace export`: a trace for other programs."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sfi_cli import options as o
from sfi_cli.commands.trace.report import beside
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import ConfigError, SfiError, unknown

if TYPE_CHECKING:  # Arrow takes time
    from sfi_cli.terminal.progress import Progress
    from sfi_traces.model.trace import Trace

TIMELINE = "perfetto"  # of the whole trace, in one file
FORMATS = (TIMELINE, "csv", "jsonl")


def export(
    folder: o.TraceDir,
    form: Annotated[str, o.option(o.OUTPUT, "perfetto, csv or jsonl.", "--format")],
    table: Annotated[str | None, o.option(o.OUTPUT, "Only this table, of csv and jsonl.", shown="all")] = None,
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
    """Write a trace as a timeline for ui.perfetto.dev, or as CSV or JSON lines.

    Without --table, each table is a file in a folder; a list is written as JSON. A file that ends in .gz is
    compressed; ui.perfetto.dev opens such a file.

    For example:

      sfi trace export run --format perfetto

      sfi trace export run --format csv -o tables

      sfi trace export run --format jsonl --table steps
    """
    from sfi_cli.terminal.progress import Progress
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
        _make(output)
    with Progress(quiet=quiet) as progress, ExitStack() as stack:
        # open all files first, so that a file that exists stops the export before anything is written
        files = {name: stack.enter_context(Output(path, force=force)) for name, path in paths.items()}
        for name, file in files.items():
            file.pieces(_pieces(trace, name, form, progress), stack)
    for path in filter(None, paths.values()):
        message(f"Wrote {path}")


def _pieces(trace: "Trace", table: str | None, form: str, progress: "Progress") -> Iterator[str]:
    from sfi_traces.export.perfetto import perfetto_text
    from sfi_traces.export.rows import table_text

    show = partial(progress.update, f"exporting {table or 'the timeline'}")
    return perfetto_text(trace, show) if table is None else table_text(trace, table, form, show)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"output {folder} must be a folder for all tables, got a file") from error
    except OSError as error:
        raise SfiError(f"output {folder} cannot be written: {error.strerror}") from error
