"""What `sfi trace diff` prints."""

from collections.abc import Iterator
from typing import Any

from sfi_cli.terminal.tables import count, duration, number, pairs, percent, ratio, rendered, table
from sfi_traces.summary.diff import place_words

MOST_STEPS = 16
NUMBERS = (  # name, title, function that writes it
    ("steps", "steps", count),
    ("slow", "slow steps", count),
    ("slow_share", "slow from step 1 on", percent),
    ("read_ratio", "cache read", percent),
    ("retained_mass", "retained mass of fast steps", number),
    ("lambda_star", "lambda*", lambda value: number(value, 4)),
    ("prefill_p50_us", "prefill", duration),
    ("slow_p50_us", "slow step, p50", duration),
    ("fast_p50_us", "fast step, p50", duration),
    ("tokens_per_second", "tokens/s", lambda value: number(value, 1)),
)

Row = dict[str, Any]


def diff_text(document: Row) -> str:
    """Return both traces' numbers, the settings that differ, where tokens part, and overlaps of supports."""
    lines = [*_setting_lines(document["settings"]), ""]
    for request in document["requests"]:
        lines += _request_lines(request)
    tables = [
        _overlap_table(f"Overlap of {title} at equal steps", document[name])
        for name, title in (("supports", "the supports"), ("selections", "the selections"))
        if document[name]
    ]
    folders = pairs((letter, document[letter.lower()]["trace"]) for letter in "AB")
    return rendered([folders, _numbers_table(document), *lines, *(["", *tables] if tables else [])])


def _numbers_table(document: Row) -> Any:
    sides = document["a"], document["b"]
    rows = [("policy", *(side["policy"] for side in sides), "")]
    for name, title, write in NUMBERS:
        factor = document["ratios"].get(name)
        last = "" if factor is None else ratio(factor)
        rows.append((title, *(write(side[name]) for side in sides), last))
    rows.append(("audit's cost in times", *("yes" if side["audited"] else "no" for side in sides), ""))
    return table("", ("", "A", "B", "B / A"), rows)


def _setting_lines(settings: Row) -> list[str]:
    changes = [f"{name}: {pair['a']} in A, {pair['b']} in B" for name, pair in settings.items()]
    return changes or ["same settings"]


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
    return f"id {token['token_id']}" if token["token_text"] is None else repr(token["token_text"])


def _overlap_table(title: str, found: Row) -> Any:
    names = ("mean", "sd", "p5", "p50", "p95")
    rows = [
        (place, *(number(values[name]) for name in names), count(values["n"]))
        for place, values in [
            ("all", found["overlap"]),
            *((str(one["layer"]), one["overlap"]) for one in found["layers"]),
        ]
    ]
    return table(title, ("layer", *names, "n"), rows)
