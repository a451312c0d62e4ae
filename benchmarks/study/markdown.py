"""Tables as Markdown."""

import textwrap
from collections.abc import Sequence

WIDTH = 120  # of a line of words


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table; a line of words where it has no rows."""
    if not rows:
        return "No rows yet.\n"
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def page(title: str, about: str, parts: Sequence[tuple[str, str]]) -> str:
    """Write a page: its title, what it is about, and parts of a line of words and a table."""
    about = "\n".join(textwrap.wrap(about, WIDTH))
    return f"# {title}\n\n{about}\n\n" + "\n".join(f"{words}\n\n{text}" for words, text in parts)
