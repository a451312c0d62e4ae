"""`sfi trace check`: whether a trace is sound, and its selections healthy."""

import typer

from sfi_cli import options as o

UNSOUND, UNHEALTHY = 3, 1


def check(folder: o.TraceDir, json: o.Json = False) -> None:
    """Read every part of a trace, and check that its slow steps follow from its tokens.

    In a lossless run, verifications must also agree with each other and with the steps. The trace of a run
    that was killed is sound if it can be read. Exits with 3 if a part is damaged, a column is missing or a
    step breaks a rule.

    A sound trace is then judged by the rules of selection health (docs/traces.md): evicted sinks, a selection
    that is a window or never changes, scores that are all equal, dropped top positions, drift and more. Exits
    with 1 if a rule finds a problem; notes do not change the exit code.

    For example:

      sfi trace check run
    """
    from sfi_cli.commands.trace.check_views import check_text
    from sfi_cli.terminal.output import Output
    from sfi_traces.health import judge
    from sfi_traces.model.trace import Trace
    from sfi_traces.read.check import check as look
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
