"""`sfi trace check`: whether a trace is whole."""

import typer

from sfi_cli import options as o

UNSOUND = 3


def check(folder: o.TraceDir, json: o.Json = False) -> None:
    """Read every part of a trace, and see whether its slow steps follow from its tokens.

    Of a lossless run also whether its verifications add up: to each other, and to the steps that they gave.
    What is left of a run that was killed is sound as long as it can be read. Exits with 3 if a part is
    damaged, a column is missing or a step breaks a rule.

    For example:

      sfi trace check run
    """
    from sfi_cli.commands.trace.check_views import check_text
    from sfi_cli.terminal.output import Output
    from sfi_traces.read.check import check as look
    from sfi_traces.read.reader import Trace

    document = look(Trace.open(folder))
    Output(json=json).data(document, check_text)
    if not document["sound"]:
        raise typer.Exit(UNSOUND)
