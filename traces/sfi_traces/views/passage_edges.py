"""Cuts marked positions of a text into passages, for every list of passages.

Paper gap: what a passage is. Positions with at most `GAP` others between them are one; it ends with a
sentence once it has `LONG` tokens, and with `LONGEST` at the latest.
"""

from collections.abc import Iterable, Sequence

GAP, LONG, LONGEST = 2, 24, 64  # see above
ENDS = (".", "!", "?", "\n")


def passage_edges(at: Iterable[int], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the first and last position of each passage.

    `at` are the marked positions, ascending; `texts` has the text of each position of the context.
    """
    found: list[tuple[int, int]] = []
    first = last = -1
    for position in at:
        if last < 0:
            first = position
        elif position - last > GAP + 1 or _is_long(last - first + 1, texts[last]):
            found.append((first, last))
            first = position
        last = position
    return found if last < 0 else [*found, (first, last)]


def _is_long(tokens: int, text: str) -> bool:
    return tokens >= LONGEST or (tokens >= LONG and text.rstrip(" ").endswith(ENDS))
