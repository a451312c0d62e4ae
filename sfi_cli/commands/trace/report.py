"""`sfi trace report`: a trace as one HTML file; opens a trace for figures, and names the files beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output, message
from sfi_core.errors import SfiError

if TYPE_CHECKING:  # numpy and Arrow take time
    from sfi_traces.model.request import Request


def report(
    trace: o.TraceDir,
    request: Annotated[o.Number, typer.Option(help="The request.", show_default="the first")] = None,
    output: Annotated[o.File, o.output("The HTML file.", shown="DIR-report.html beside the trace")] = None,
    force: o.Force = False,
) -> None:
    """Write one HTML file with interactive figures, the summary and the generated text.

    The file works offline. It contains the prompt, unless the trace was recorded with trace.redact_text.

    For example:

      sfi trace report run

      sfi trace report run --request 2 -o run.html --force
    """
    from sfi_traces.report import check_report, render

    check_report()
    view = open_view(trace, request)
    with Output(output or beside(trace, "report.html"), force=force) as file:
        file.text(render(view))


@contextmanager
def report_after(trace: Path, *, force: bool, quiet: bool) -> Iterator[None]:
    """Write the report of the trace that the body records; check before the body that it can be written.

    Raises `ConfigError` if the report's file exists and `force` is off, `BackendError` without Plotly.
    """
    from sfi_traces.report import check_report, render

    check_report()
    path = beside(trace, "report.html")
    make_folder(path.parent)
    with Output(path, force=force, quiet=quiet) as file:
        yield
        if file.path is not None:  # None on all ranks but the first
            file.text(render(open_view(trace, None)))


def beside(trace: Path, name: str) -> Path:
    """Name a file after a trace, in the trace's parent folder."""
    folder = trace.resolve()
    # the parent as the user wrote it, unless the trace is a path such as `.`
    place = trace.parent if trace.name == folder.name else folder.parent
    return place / f"{folder.name}-{name}"


def open_view(trace: Path, request: int | None, layer: int | None = None, head: int | None = None) -> "Request":
    """Open a trace and choose the part to show, as `Request` does; tell the user about other requests."""
    from sfi_traces.model.request import Request
    from sfi_traces.model.trace import Trace

    chosen = Request(Trace.open(trace), request, layer, head)
    if request is None and len(chosen.requests) > 1:
        message(f"showing request {chosen.index} of {len(chosen.requests)}; --request chooses another")
    return chosen


def make_folder(folder: Path) -> None:
    """Make a folder of outputs, if it is not there; raises `SfiError` if it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SfiError(f"output {folder} cannot be made: {error.strerror}") from error
