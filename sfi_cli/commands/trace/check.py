"""`sfi trace check`: whether a trace is whole."""

import typer

from sfi_cli import options as o

UNSOUND, UNHEALTHY = 3, 1


def check(folder: o.TraceDir, json: o.Json = False) -> None:
    """Read every part of a trace, and see whether its slow steps follow from its tokens.

    Of a lossless run also whether its verifications add up: to each other, and to the steps that they gave.
    What is left of a run that was killed is sound as long as it can be read. Exits with 3 if a part is
    damaged, a column is missing or a step breaks a rule.

    A sound trace is then judged by the rules of selection health (docs/traces.md): evicted sinks, a selection
    that is a window or never changes, scores that are all equal, dropped top positions, drift and more. Exits
    with 1 if there is such a problem; a note changes nothing.

    For example:

      sfi trace check run
    """
    from sfi_cli.commands.trace.check_views import check_text
    from sfi_cli.terminal.output import Output
    from sfi_traces.health import judge
    from sfi_traces.read.check import check as look
    from sfi_traces.read.reader import Trace
    from sfi_traces.summary import Scope

    trace = Trace.open(folder)
    document = look(trace)
    judged = document["sound"] and document["recorded"]
    document["health"] = health = judge(Scope.of(trace)) if judged else None
    Output(json=json).data(document, check_text)
    if not document["sound"]:
        raise typer.Exit(UNSOUND)
    if health is not None and not health["sound"]:
        raise typer.Exit(UNHEALTHY)
