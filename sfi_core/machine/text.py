"""Text, and text that came from a file or a client made safe to read and to show."""

import json
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

LONGEST = 200  # characters of a value in an error


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return how many items two texts, or lists of tokens, share from the first on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def printable(text: str) -> str:
    """Escape line breaks and all else that does not print, as Python's repr does."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def printable_lines(text: str) -> str:
    """Escape what does not print, except line breaks."""
    return "\n".join(map(printable, text.split("\n")))


def shown(value: Any) -> str:
    """Return the repr of a value for an error, cut to `LONGEST` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"{type(value).__name__} too long to show"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def first_line(error: Exception) -> str:
    """Return an error's first line as `printable`, without its final stop; two lines where a colon ends the first."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return printable(" ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip("."))


def parse_json(text: str | bytes) -> Any:
    """Read JSON; raise `ValueError`, also where it is nested too deeply or has a number of thousands of digits."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def write_json(value: Any, **options: Any) -> str:
    """Write JSON in the characters that print; the others, such as a terminal's, are escaped."""
    text = json.dumps(value, ensure_ascii=False, **options)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
