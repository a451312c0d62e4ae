"""Tables on a terminal: text without colors, with as many columns as there is room for."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from sfi_traces.views.table import Table

GAP, MARGIN = 3, 2  # between two columns, and before the first
LEAST = 14  # columns that a text keeps when it is cut

Part = str | Table


def rendered(parts: Iterable[Part], width: int | None = None) -> str:
    """Return lines and tables as text of at most `width` columns; None is as wide as they are."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, str):
            lines += wrapped(part, width)
        elif not part.head:
            lines += _pairs(part.rows, width)
        else:
            lines += [*(wrapped(part.title, width) if part.title else ()), *_table(part, width)]
    return "\n".join(line.rstrip() for line in lines).strip("\n") + "\n"


def noted(tables: Iterable[Part], notes: Iterable[str]) -> list[Part]:
    """Return tables with notes below them."""
    return [*tables, *(f"* {note}" for note in notes)]


def shortened(text: str, most: int) -> str:
    """Cut the middle of a text of more than `most` characters out."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Break lines at `width` columns, None for no width; what goes on below begins with `indent`."""
    lines = text.split("\n") if text else []
    if width is None:
        return lines or [""]
    wrap = textwrap.TextWrapper(width, subsequent_indent=indent, break_on_hyphens=False).wrap
    return [piece for line in lines for piece in wrap(line) or [""]] or [""]


def _pairs(rows: Iterable[Sequence[str]], width: int | None, margin: str = "") -> Iterator[str]:
    rows = [*rows]
    wide = max((len(name) for name, _ in rows), default=0)
    if width is not None:
        wide = min(wide, width // 2)
    for name, value in rows:
        yield from wrapped(f"{margin}{name:<{wide}}  {value}", width, margin + " " * (wide + 2))


def _table(table: Table, width: int | None) -> Iterator[str]:
    cells = [*zip(table.head, *table.rows, strict=True)]
    sizes, heads = [_size(column) for column in cells], [[name] for name in table.head]
    shown, spare = [*range(len(cells))], [table.head.index(name) for name in table.spare]
    left_out = []
    if width is not None and _wide(sizes) > width:  # headings on several lines, then fewer columns
        for at, column in enumerate(cells):
            sizes[at] = max(_size(column[1:]), *(len(word) for word in [*column[0].split(), ""]))
            heads[at] = textwrap.wrap(column[0], max(1, sizes[at])) or [""]
        while _wide([sizes[at] for at in shown]) > width and spare:
            left_out.append(spare.pop(0))
            shown.remove(left_out[-1])
        texts = [at for at in shown if at < table.left]
        while (over := _wide([sizes[at] for at in shown]) - width) > 0 and texts:  # then shorter texts
            longest = max(texts, key=sizes.__getitem__)
            texts.remove(longest)
            sizes[longest] = max(min(sizes[longest], LEAST), sizes[longest] - over)
        if over > 0:
            for row in table.rows:
                yield from ["", *_pairs(zip(table.head, row, strict=True), width, " " * MARGIN)]
            return
    high = max(len(heads[at]) for at in shown)
    rows = [[[*[""] * (high - len(heads[at])), *heads[at]][line] for at in shown] for line in range(high)]
    rows += [[row[at] for at in shown] for row in table.rows]
    yield ""
    for number, row in enumerate(rows):
        padded = (_padded(cell, sizes[at], left=at < table.left) for at, cell in zip(shown, row, strict=True))
        yield " " * MARGIN + (" " * GAP).join(padded)
        if number == high - 1:
            yield " " + "─" * (_wide([sizes[at] for at in shown]) - MARGIN)
    if left_out:
        names = ", ".join(table.head[at] for at in sorted(left_out))
        yield from wrapped(f"{' ' * MARGIN}--wide also shows: {names}", width)
    yield ""


def _size(cells: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, cells), default=0)


def _wide(sizes: Sequence[int]) -> int:
    return sum(sizes) + GAP * (len(sizes) - 1) + 2 * MARGIN


def _padded(text: str, size: int, *, left: bool) -> str:
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) > size:
        text = f"{set_cell_size(text, size - 1)}…"
    return text + " " * (size - cell_len(text)) if left else " " * (size - cell_len(text)) + text
