"""What `sfi trace diff` prints."""

from collections.abc import Iterator

from sfi_cli.terminal.tables import Part
from sfi_traces.summary.diff import place_words
from sfi_traces.views.diff_tables import numbers_table, overlap_tables
from sfi_traces.views.table import Row, Table, percent

MOST_STEPS = 16


def diff_text(document: Row) -> list[Part]:
    """Return both traces' numbers, the settings that differ, where tokens part, and overlaps of supports."""
    lines = [*_setting_lines(document["settings"]), ""]
    for request in document["requests"]:
        lines += _request_lines(request)
    folders = Table("", (), [(letter, document[letter.lower()]["trace"]) for letter in "AB"])
    tables: list[Part] = [*overlap_tables(document)]
    return [folders, numbers_table(document), *lines, *(["", *tables] if tables else [])]


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
