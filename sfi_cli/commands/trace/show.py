"""`sfi trace show`: a trace in numbers."""

from typing import Annotated

import typer

from sfi_cli import options as o


def show(
    folder: o.TraceDir,
    request: o.RequestIndex = None,
    layer: Annotated[int | None, typer.Option(help="Only this layer.")] = None,
    step: Annotated[int | None, typer.Option(help="Show the text that this decoding step read, instead.")] = None,
    head: Annotated[int | None, typer.Option(help="Only this KV head, with --step.")] = None,
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Sum a trace up: steps, triggers, overlap of supports, retained mass, lambda*, latency, break-even.

    An audited trace also shows attention drift, temporal locality and the similarity of heads (SyncKV), and
    the query cosine by layer and KV head (FreeKV); a run with corrections or recalls shows these. A lossless
    run shows verifications, and acceptance by place in the sentence and by depth in the draft.

    --step shows the passages that a decoding step read, by layer and KV head. If the step was audited, it
    also shows their share of dense attention, and the passages that the step should have read.

    For example:

      sfi trace show run

      sfi trace show run --request 0 --layer 3 --json

      sfi trace show run --step 40 --layer 3 --head 1
    """
    from sfi_cli.commands.trace.show_views import show_text
    from sfi_cli.commands.trace.step_views import step_text
    from sfi_cli.terminal.output import Output
    from sfi_core.errors import ConfigError
    from sfi_traces.model.trace import Trace
    from sfi_traces.summary import summarize
    from sfi_traces.views.view import View
    from sfi_traces.views.words import step_words

    trace = Trace.open(folder)
    if head is not None and step is None:
        raise ConfigError(f"head must come with --step, got --head {head} alone")
    with Output(output, json=json, force=force) as written:
        if step is None:
            written.data(summarize(trace, request, layer), show_text)
        else:
            words = step_words(View(trace, request, layer, head), step)
            written.data(words.to_dict(), step_text)
