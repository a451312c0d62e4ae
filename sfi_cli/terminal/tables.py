"""Tables for a terminal, as text without colors."""

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH, TEXT_WIDTH = 400, 110  # most columns of a table; columns at which text is wrapped


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> Any:
    """Make a table; its first `left` columns are words, the others numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD)
    for index, heading in enumerate(columns):
        grid.add_column(heading, justify="left" if index < left else "right", no_wrap=index >= left)
    for row in rows:
        grid.add_row(*row)
    # rich would break the title of a Table at the table's width
    return Group(title, grid) if title else grid


def pairs(rows: Iterable[tuple[str, str]]) -> Any:
    """Make a table of names and values."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for row in rows:
        grid.add_row(*row)
    return grid


def rendered(parts: Iterable[Any]) -> str:
    """Return tables and lines as text, without empty lines before and after."""
    return printed(plain_console(WIDTH), parts).strip("\n") + "\n"


def wrapped(blocks: Iterable[Any]) -> str:
    """Return tables and lines as text, the lines wrapped."""
    return rendered(
        part for block in blocks for part in (textwrap.wrap(block, TEXT_WIDTH) if isinstance(block, str) else [block])
    )


def noted(tables: Iterable[Any], notes: Iterable[str] = ()) -> str:
    """Return tables and the notes below them as text."""
    return rendered(tables) + "\n" + "".join(f"* {note}\n" for note in notes)


def plain_console(width: int) -> Any:
    """Return a console that writes plain text of `width` columns to memory."""
    from rich.console import Console

    # without markup: a token may look like it
    plain: dict[str, Any] = dict.fromkeys(("markup", "emoji", "highlight"), False)
    return Console(file=io.StringIO(), width=width, color_system=None, **plain)


def printed(console: Any, parts: Iterable[Any]) -> str:
    """Print on a `plain_console` and return the lines."""
    for part in parts:
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


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
