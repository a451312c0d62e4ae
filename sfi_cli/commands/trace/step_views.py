"""A step of `sfi trace show --step`, from its document."""

from collections.abc import Iterator, Sequence
from typing import Any

from sfi_cli.terminal.tables import count, number, pairs, plural, rendered, table
from sfi_core.machine.text import printable

MOST_ROWS = 20
LONGEST, LONGEST_HEADS = 90, 36  # characters
MOST_REFRESHES = 6

Row = dict[str, Any]


def step_text(found: Row) -> str:
    """Return facts of the step, the passages that it read, and the passages that it missed."""
    parts: list[Any] = [pairs(_lines(found)), ""]
    parts += [f"note: {note}" for note in found["notes"]]
    title = "Passages that it read"
    if any(one["part"] == "all" for one in found["passages"]):
        title = "Passages it looked at most, of all that it read"
    parts.append(_passages(title, found, found["passages"]))
    if found["missed"]:
        title = "Passages that dense attention looked at, and the step did not read"
        parts.append(_passages(title, found, found["missed"]))
    elif not found["masses"]:
        parts.append("not recorded: mass, for the imported file has none")
    elif not found["audited"]:
        parts.append("not recorded: mass, and what the step should have read (audit the step: --audit N)")
    return rendered(parts)


def _lines(found: Row) -> Iterator[tuple[str, str]]:
    kind = f"slow, {found['reason']}" if found["slow"] else "fast"
    yield "step", f"{found['step']}: {kind}, gave {printable(found['token'])!r}"
    yield ("read", f"{number(found['attended'], 0)} of {count(found['context'])} tokens a KV head, on average")
    refreshed = found["refreshed"]
    if refreshed:
        shown = ", ".join(map(str, refreshed[-MOST_REFRESHES:]))
        more = f", and {len(refreshed) - MOST_REFRESHES:,} earlier ones" * (len(refreshed) > MOST_REFRESHES)
        yield "selected at", f"step {shown}{more}"
    looked = _heads(found["places"])
    audited = _heads(found["audited"])
    audit = f", {audited or 'none'} of them audited at this step" * found["masses"]
    yield "of", plural(looked, "KV head") + audit


def _passages(title: str, found: Row, passages: Sequence[Row]) -> Any:
    rows = [
        (
            f"{one['first']}-{one['last']}", one["part"], _shortened(one["text"]), _where(one["places"]),
            f"{one['heads']:,}", count(one["tokens"]), number(one["mass"], 4),
        )
        for one in passages[:MOST_ROWS]
    ]  # fmt: skip
    if more := len(passages) - len(rows):
        title += f"; the first {len(rows)}, and {more:,} more in --json"
    if found["audited"]:
        held = sum(one["mass"] or 0.0 for one in passages)
        title += f"; all hold {held:.1%} of the attention"
    return table(title, ("positions", "part", "text", "layer: heads", "heads", "tokens", "mass"), rows, left=4)


def _heads(places: Sequence[Row]) -> int:
    return sum(len(one["heads"]) for one in places)


def _where(places: Sequence[Row]) -> str:
    text = "; ".join(f"{one['layer']}: {' '.join(map(str, one['heads']))}" for one in places)
    return text if len(text) <= LONGEST_HEADS else f"{text[: LONGEST_HEADS - 1]}…"


def _shortened(text: str) -> str:
    text = printable(text)
    if len(text) <= LONGEST:
        return text
    half = (LONGEST - 3) // 2
    return f"{text[:half]} … {text[-half:]}"
