"""`sfi trace show`: a trace in numbers."""

from typing import Annotated

import typer

from sfi_cli import options as o


def show(
    folder: o.TraceDir,
    request: o.RequestIndex = None,
    layer: Annotated[int | None, typer.Option(help="Only this layer.")] = None,
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Sum a trace up: steps, triggers, overlap of supports, retained mass, lambda*, latency, break-even.

    Of an audited trace also attention drift, temporal locality and the similarity of heads (SyncKV), and the
    query cosine by layer and KV head (FreeKV); corrections and recalls where the run had them. Of a lossless
    run verifications, and acceptance by place in the sentence and by depth in the draft.

    For example:

      sfi trace show run

      sfi trace show run --request 0 --layer 3 --json
    """
    from sfi_cli.commands.trace.show_views import show_text
    from sfi_cli.terminal.output import Output
    from sfi_traces.read.reader import Trace
    from sfi_traces.summary import summarize

    trace = Trace.open(folder)
    with Output(output, json=json, force=force) as written:
        written.data(summarize(trace, request, layer), show_text)
