"""The text of a run as lines of a terminal: finds tokens and words by place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_cli.commands.trace.replay.frame_view import blanked

Ints = npt.NDArray[np.integer[Any]]
Span = tuple[int, int]  # first character, end (exclusive)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextLayout:
    """The text of a run's tokens, control characters as blanks; `folded` is the same in small letters.

    `start_T` has the first character of each token, `cell_C` the columns before each character; both end with
    the whole.
    """

    text: str
    start_T: Ints
    cell_C: Ints
    folded: str

    @classmethod
    def of(cls, tokens: Sequence[str]) -> Self:
        """Join tokens, and compute where each one begins."""
        text = blanked("".join(tokens))
        folded = text.lower() if text.isascii() else "".join(map(_lower, text))
        size = np.fromiter(map(len, tokens), np.int64, len(tokens))
        start_T = np.concatenate([[0], np.cumsum(size)])
        return cls(text=text, start_T=start_T, cell_C=_cells(text), folded=folded)

    def wrapped(self, width: int) -> tuple[list[int], list[int]]:
        """Break the text after blanks into lines of at most `width` columns; return begins and ends."""
        begins, ends = [], []
        at, size = 0, len(self.text)
        while at <= size:
            newline = self.text.find("\n", at)
            end = size if newline < 0 else newline
            while at < end and self.cell_C[end] - self.cell_C[at] > width:
                fits = int(np.searchsorted(self.cell_C, self.cell_C[at] + width, "right")) - 1
                blank = self.text.rfind(" ", at, fits + 1)
                cut = blank + 1 if blank > at else max(fits, at + 1)
                begins.append(at)
                ends.append(cut)
                at = cut
            begins.append(at)
            ends.append(end)
            at = end + 1
        return begins, ends

    def token_at(self, character: int) -> int:
        """Return the token of a character."""
        return int(np.searchsorted(self.start_T, character, "right")) - 1

    def character_at(self, line: Span, column: int) -> int | None:
        """Return the character in a column of a line; None behind the line's end."""
        first, end = line
        cell = self.cell_C[first] + column
        at = int(np.searchsorted(self.cell_C, cell, "right")) - 1
        return at if at < end else None

    def find(self, words: str, start: int, *, backwards: bool = False) -> Span | None:
        """Find words from `start` on, or before it; wrap around at the end, ignore case."""
        wanted = "".join(map(_lower, words))
        if backwards:
            at = self.folded.rfind(wanted, 0, max(0, start + len(wanted) - 1))
            at = self.folded.rfind(wanted) if at < 0 else at
        else:
            at = self.folded.find(wanted, start)
            at = self.folded.find(wanted) if at < 0 else at
        return None if at < 0 or not wanted else (at, at + len(wanted))


def _lower(character: str) -> str:
    # a character whose small form is longer stays as it is, so that lengths agree
    small = character.lower()
    return small if len(small) == 1 else character


def _cells(text: str) -> Ints:
    if text.isascii():
        return np.arange(len(text) + 1)
    from rich.cells import cell_len

    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    kinds, kind_C = np.unique(codes, return_inverse=True)
    widths = np.array([cell_len(chr(kind)) for kind in kinds.tolist()])
    return np.concatenate([[0], np.cumsum(widths[kind_C])])
