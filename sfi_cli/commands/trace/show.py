"""`sfi trace show`: a trace in numbers."""

from typing import Annotated

import typer

from sfi_cli import options as o


def show(
    folder: o.TraceDir,
    request: o.RequestIndex = None,
    layer: Annotated[o.Number, typer.Option(help="Only this layer.")] = None,
    step: Annotated[o.Number, typer.Option(help="Show the text that this decoding step read, instead.")] = None,
    head: Annotated[o.Number, typer.Option(help="Only this KV head, with --step.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Show every table, not one screen.")] = False,
    wide: o.Wide = False,
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Sum a trace up: what ran, its answer, where full attention would have said something else, health, speed.

    --full adds tables: triggers, overlap of supports, retained mass by layer, lambda*, latency; attention
    drift and the similarity of heads (SyncKV); the query cosine (FreeKV); corrections and recalls; a lossless
    run's verifications.

    --step shows the passages that a decoding step read, by layer and KV head. If the step was audited, it
    also shows their share of dense attention, and the passages that the step should have read.

    For example:

      sfi trace show run

      sfi trace show run --request 0 --layer 3 --json

      sfi trace show run --step 40 --layer 3 --head 1
    """
    from sfi_cli.commands.trace.full_views import full_text
    from sfi_cli.commands.trace.show_views import show_text, step_text
    from sfi_cli.terminal.output import Output
    from sfi_core.errors import ConfigError
    from sfi_traces.model.request import Request
    from sfi_traces.model.trace import Trace
    from sfi_traces.summary import summarize
    from sfi_traces.views.words import step_words

    trace = Trace.open(folder)
    if head is not None and step is None:
        raise ConfigError(f"head must come with --step, got --head {head} alone")
    with Output(output, json=json, force=force, wide=wide) as written:
        if step is None:
            written.data(summarize(trace, request, layer), full_text if full else show_text)
        else:
            words = step_words(Request(trace, request, layer, head), step)
            written.data(words.to_dict(), step_text)
