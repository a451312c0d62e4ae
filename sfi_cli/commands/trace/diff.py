"""`sfi trace diff`: two traces beside each other."""

from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o


def diff(
    first: Annotated[Path, typer.Argument(help="Folder of the first trace.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the second trace.", metavar="B")],
    request: o.RequestIndex = None,
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Compare two runs of one model on the same prompts: tokens, slow steps, supports, speed, settings.

    For example:

      sfi trace diff dense run

      sfi trace diff run other --request 0 --json
    """
    from sfi_cli.commands.trace.diff_views import diff_text
    from sfi_cli.terminal.output import Output
    from sfi_traces.read.reader import Trace
    from sfi_traces.summary.diff import compare

    traces = Trace.open(first), Trace.open(second)
    with Output(output, json=json, force=force) as written:
        written.data(compare(*traces, request), diff_text)
