"""Small tables, numbers and phrases as text, for terminals and pages; imports nothing heavy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

Row = Mapping[str, Any]
# how a value is written and its name in the row, or a function of the row
Column = tuple[Callable[[Any], str], str] | Callable[[Any], str]
Columns = dict[str, Column]  # by heading


@dataclass(frozen=True, slots=True)
class Table:
    """A table; its first `left` columns are words, the others numbers.

    `head` is empty for a list of names and values. `spare` names columns that may be left out where there is
    no room, the first one first.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1
    spare: Sequence[str] = ()

    @classmethod
    def of(cls, title: str, columns: Columns, rows: Iterable[Row], **more: Any) -> Self:
        """Write the columns of each row."""
        cells = [[written(column, row) for column in columns.values()] for row in rows]
        return cls(title, (*columns,), cells, **more)


def written(column: Column, row: Row) -> str:
    """Write a column of a row."""
    return column(row) if callable(column) else column[0](row[column[1]])


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with `digits` decimals; a dash for None."""
    return "-" if value is None else f"{value:,.{digits}f}"


def count(value: int | None) -> str:
    """Write a whole number; a dash for None."""
    return "-" if value is None else f"{value:,}"


def plural(value: int, noun: str) -> str:
    """Write a count with its noun: 1 step, 2 steps."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def percent(value: float | None, digits: int = 1) -> str:
    """Write a share; a dash for None."""
    return "-" if value is None else f"{value:.{digits}%}"


def ratio(value: float | None) -> str:
    """Write a factor; a dash for None."""
    return "-" if value is None else f"{value:.2f}x"


def duration(microseconds: float | None) -> str:
    """Write a time in us, ms or s; a dash for None."""
    if microseconds is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= size:
            return f"{microseconds / size:,.2f} {unit}"
    return f"{microseconds:,.1f} us"


def span(first: int, last: int) -> str:
    """Name a bin of integers: "1", "3-4"."""
    return f"{first}" if first == last else f"{first}-{last}"


def quoted(text: str) -> str:
    """Quote a token's text; an empty one has some bytes of a character that the next token ends."""
    return repr(text) if text else "(part of a character)"


def dense_words(row: Mapping[str, Any]) -> str:
    """Say what dense attention's most probable token is, from a row of the table `logits`."""
    text, probability = row["dense_token_text"], row["dense_probability"]
    token = "another token" if text is None else quoted(text)
    return token if probability is None else f"{token} ({probability:.0%})"


SPREAD = ("mean", "sd", "p5", "p50", "p95", "n")  # columns of a distribution


def spread(values: Row | None, digits: int = 3) -> list[str]:
    """Write the columns `SPREAD` of a distribution; None is one of nothing."""
    known = values or {"n": 0}
    return [*(number(known.get(name), digits) for name in SPREAD[:-1]), count(known["n"])]
