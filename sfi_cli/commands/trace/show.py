"""`sfi trace show`: a trace in numbers, or what a step of it read."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.commands.trace.show_views import full_text, show_text
from sfi_cli.terminal.output import Output
from sfi_cli.terminal.tables import Part, shortened
from sfi_core.errors import ConfigError
from sfi_core.machine.text import printable
from sfi_traces.views.table import Columns, Row, Table, count, dense_words, number, plural

MOST_ROWS = 20
LONGEST_PASSAGE, LONGEST_HEADS = 90, 36  # characters
MOST_REFRESHES = 6


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
            written.data(step_words(Request(trace, request, layer, head), step), step_text)


def step_text(step: Row) -> list[Part]:
    """Return facts of the step, the passages that it read, and the passages that it missed."""
    parts: list[Part] = [Table("", (), [*_lines(step)]), ""]
    parts += [f"note: {note}" for note in step["notes"]]
    title = "Passages that it read"
    if any(passage["part"] == "all" for passage in step["passages"]):
        title = "Passages it looked at most, of all that it read"
    parts.append(_passages(title, step, step["passages"]))
    if step["missed"]:
        title = "Passages that dense attention looked at, and the step did not read"
        parts.append(_passages(title, step, step["missed"]))
    elif not step["masses"]:
        parts.append("not recorded: mass, for the imported file has none")
    elif not step["audited"]:
        parts.append("not recorded: mass, and what the step should have read (audit the step: --audit N)")
    return parts


def _lines(step: Row) -> Iterator[tuple[str, str]]:
    kind = f"slow, {step['reason']}" if step["slow"] else "fast"
    yield "step", f"{step['step']}: {kind}, gave {printable(step['token'])!r}"
    if dense := step["dense"]:
        same = "the same token" if dense["argmax_agrees"] else dense_words(dense)
        yield "full attention", f"{same}, KL {number(dense['kl_next_token'], 4)}"
    yield "read", f"{number(step['attended'], 0)} of {count(step['context'])} tokens a KV head, on average"
    if refreshed := step["refreshed"]:
        shown = ", ".join(map(str, refreshed[-MOST_REFRESHES:]))
        more = f", and {len(refreshed) - MOST_REFRESHES:,} earlier ones" * (len(refreshed) > MOST_REFRESHES)
        yield "selected at", f"step {shown}{more}"
    looked, audited = (sum(len(place["heads"]) for place in step[name]) for name in ("places", "audited"))
    audit = f", {audited or 'none'} of them audited at this step" * step["masses"]
    yield "of", plural(looked, "KV head") + audit


def _passages(title: str, step: Row, passages: Sequence[Row]) -> Table:
    if (more := len(passages) - MOST_ROWS) > 0:
        title += f"; the first {MOST_ROWS}, and {more:,} more in --json"
    if step["audited"]:
        held = sum(passage["mass"] or 0.0 for passage in passages)
        title += f"; all hold {held:.1%} of the attention"
    return Table.of(title, PASSAGES, passages[:MOST_ROWS], left=4, spare=("layer: heads", "tokens"))


def _where(places: Sequence[Row]) -> str:
    heads = "; ".join(f"{place['layer']}: {' '.join(map(str, place['heads']))}" for place in places)
    return shortened(heads, LONGEST_HEADS)


PASSAGES: Columns = {
    "positions": lambda passage: f"{passage['first']}-{passage['last']}",
    "part": (str, "part"),
    "text": lambda passage: shortened(printable(passage["text"]), LONGEST_PASSAGE),
    "layer: heads": (_where, "places"),
    "heads": (count, "heads"),
    "tokens": (count, "tokens"),
    "mass": (partial(number, digits=4), "mass"),
}
