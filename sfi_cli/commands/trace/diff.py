"""`sfi trace diff`: compare two traces."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sfi_cli import options as o
from sfi_cli.terminal.output import Output, message
from sfi_cli.terminal.tables import Part
from sfi_traces.views.table import SPREAD, Row, Table, count, duration, number, percent, quoted, ratio, spread

MOST_STEPS = 16
FAILS = "Exit with 1 if this holds: overlap<0.9, first_difference<100, speed<0.8 (docs/traces.md). Repeat for more."
NUMBERS: dict[str, tuple[str, Callable[[Any], str]]] = {  # title: name, function that writes it
    "steps": ("steps", count),
    "slow steps": ("slow", count),
    "share of slow steps": ("slow_share", percent),
    "cache read": ("cache_read_ratio", percent),
    "retained mass of fast steps": ("retained_mass", number),
    "lambda*": ("lambda_star", partial(number, digits=4)),
    "prefill": ("prefill_p50_us", duration),
    "slow step, p50": ("slow_p50_us", duration),
    "fast step, p50": ("fast_p50_us", duration),
    "tokens/s": ("tokens_per_second", partial(number, digits=1)),
}


def diff(
    first: Annotated[Path, typer.Argument(help="Folder of the first trace.", metavar="A")],
    second: Annotated[Path, typer.Argument(help="Folder of the second trace.", metavar="B")],
    request: o.RequestIndex = None,
    fail_if: Annotated[o.Words, typer.Option(metavar="LIMIT", help=FAILS)] = None,
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
    from sfi_traces.summary.diff import Limit, compare

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
    tables: list[Part] = [_overlaps(document, name) for name in ("supports", "selections") if document[name]]
    return [folders, _numbers(document), *lines, *(["", *tables] if tables else [])]


def _numbers(document: Row) -> Table:
    # the numbers of both, and what B's are over A's
    sides = document["a"], document["b"]
    rows = [("policy", *(side["policy"] for side in sides), "")]
    for title, (name, write) in NUMBERS.items():
        factor = document["ratios"].get(name)
        rows.append((title, *(write(side[name]) for side in sides), "" if factor is None else ratio(factor)))
    rows.append(("audit's cost in times", *("yes" if side["audited"] else "no" for side in sides), ""))
    return Table("", ("", "A", "B", "B / A"), rows)


def _overlaps(document: Row, name: str) -> Table:
    # by layer, how far supports or selections overlap
    layers = [{"layer": "all", **document[name]}, *document[name]["layers"]]
    rows = [(str(row["layer"]), *spread(row["overlap"])) for row in layers]
    return Table(f"Overlap of the {name} at equal steps", ("layer", *SPREAD), rows)


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
        named = (first[side] for side in "ab")
        tokens = " in A, ".join(
            f"id {token['token_id']}" if token["token_text"] is None else quoted(token["token_text"]) for token in named
        )
        yield f"  they part at step {first['step']:,}, after {first['before']!r}: {tokens} in B"
    if layer := request["first_layer"]:
        heads = ", ".join(map(str, layer["heads"]))
        what = "other positions" if layer["positions"] else "another retained mass"
        place = f"step {layer['step']:,}: layer {layer['layer']}, KV head {heads}"
        yield f"  their layers part at {place}, {what} in {layer['table']}"
    compared = f"among the first {request['compared_steps']:,} steps"
    for side, only in (("A", request["slow_only_a"]), ("B", request["slow_only_b"])):
        if only:
            more = " ..." if len(only) > MOST_STEPS else ""
            yield f"  slow in {side} only, {compared}: {' '.join(map(str, only[:MOST_STEPS]))}{more}"
