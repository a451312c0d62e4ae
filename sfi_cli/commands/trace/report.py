"""`sfi trace report`: a trace as one HTML file."""

from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.commands.trace.views import beside, open_view
from sfi_cli.terminal.output import Output


def report(
    trace: o.TraceDir,
    request: Annotated[o.Number, typer.Option(help="The request.", show_default="the first")] = None,
    top: Annotated[
        o.Number,
        typer.Option(
            help="Only the most probable positions of each support.",
            show_default="all that the audit recorded; in the raster, the budget",
        ),
    ] = None,
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
    view = open_view(trace, request, top=top)
    with Output(output or beside(trace, "report.html"), force=force) as file:
        file.text(render(view))
