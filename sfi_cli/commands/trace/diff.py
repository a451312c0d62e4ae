"""`sfi trace diff`: compare two traces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output, message
from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import Row, Table, numbers_table, overlap_tables, percent, place_words, quoted

MOST_STEPS = 16


def diff(
    first: Annotated[Path, typer.Argument(help="Folder of the first trace.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the second trace.", metavar="B")],
    request: o.RequestIndex = None,
    fail_if: Annotated[
        o.Words,
        typer.Option(
            metavar="LIMIT",
            help="Exit with 1 if this holds: overlap<0.9, first_difference<100, speed<0.8. "
            "Repeat for more; docs/traces.md has the names.",
        ),
    ] = None,
    json: o.Json = False,
    output: o.OutputPath = None,
    force: o.Force = False,
) -> None:
    """Compare two runs of one model on the same prompts: tokens, layers, slow steps, supports, speed.

    For example:

      sfi trace diff dense run

      sfi trace diff run other --request 0 --json

      sfi trace diff released candidate --fail-if 'equal_share<1' --fail-if 'speed<0.8'
    """
    from sfi_traces.model.trace import Trace
    from sfi_traces.summary.diff import compare
    from sfi_traces.summary.diff_metrics import Limit

    limits = [Limit.parse(text) for text in fail_if or ()]
    traces = Trace.open(first), Trace.open(second)
    with Output(output, json=json, force=force) as written:
        document = compare(*traces, request)
        met = [(limit, limit.value_of(document)) for limit in limits if limit.meets(document)]
        written.data(document, diff_text)
    for limit, value in met:
        message(f"failed: {limit.text}, {limit.name} is {value:.6g}")
    if met:
        raise typer.Exit(1)


def diff_text(document: Row) -> list[Part]:
    """Return both traces' numbers, the settings that differ, where tokens part, and overlaps of supports."""
    changes = [f"{name}: {pair['a']} in A, {pair['b']} in B" for name, pair in document["settings"].items()]
    lines = [*(changes or ["same settings"]), ""]
    for request in document["requests"]:
        lines += _request_lines(request)
    folders = Table("", (), [(letter, document[letter.lower()]["trace"]) for letter in "AB"])
    tables: list[Part] = [*overlap_tables(document)]
    return [folders, numbers_table(document), *lines, *(["", *tables] if tables else [])]


def _request_lines(request: Row) -> Iterator[str]:
    name, steps = f"request {request['request']}", request["steps"]
    if request["equal_share"] is None:
        yield f"{name}: {steps['a']:,} and {steps['b']:,} steps, not compared: token ids were left out"
        return
    yield (
        f"{name}: {percent(request['equal_share'])} of the first {min(steps.values()):,} tokens are equal "
        f"({steps['a']:,} in A, {steps['b']:,} in B)"
    )
    first = request["first_difference"]
    if first is not None:
        tokens = " in A, ".join(_token(first[side]) for side in "ab")
        yield f"  they part at step {first['step']:,}, after {first['before']!r}: {tokens} in B"
    if request["first_layer"] is not None:
        yield f"  their layers part at {place_words(request['first_layer'])}"
    compared = f"among the first {request['compared_steps']:,} steps"
    for side, only in (("A", request["slow_only_a"]), ("B", request["slow_only_b"])):
        if only:
            more = " ..." if len(only) > MOST_STEPS else ""
            yield f"  slow in {side} only, {compared}: {' '.join(map(str, only[:MOST_STEPS]))}{more}"


def _token(token: Row) -> str:
    return f"id {token['token_id']}" if token["token_text"] is None else quoted(token["token_text"])
