"""The text of a run as lines of a terminal: which token is where, and where a word is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_cli.commands.trace.replay.frame_view import printable

Ints = npt.NDArray[np.integer[Any]]
Span = tuple[int, int]  # first character, and the one after the last


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextLayout:
    """Tokens side by side.

    Attributes:
        text: The tokens' text; control characters are blanks.
        start_T: First character of each token, and the length of the text.
        cell_C: Columns before each character, and of all of the text.
        folded: The text as a search compares it, of the same length.
    """

    text: str
    start_T: Ints
    cell_C: Ints
    folded: str

    @classmethod
    def of(cls, tokens: Sequence[str]) -> Self:
        """Lay tokens out."""
        text = printable("".join(tokens))
        # a character that is longer in small letters stays as it is
        folded = text.lower() if text.isascii() else "".join(map(_lower, text))
        size = np.fromiter(map(len, tokens), np.int64, len(tokens))
        start_T = np.concatenate([[0], np.cumsum(size)])
        return cls(text=text, start_T=start_T, cell_C=_cells(text), folded=folded)

    def wrapped(self, width: int) -> tuple[list[int], list[int]]:
        """Break the text after blanks, at so many columns.

        Returns:
            The first character of each line, and the one after its last.
        """
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
        """Return the token that a character is of."""
        return int(np.searchsorted(self.start_T, character, "right")) - 1

    def character_at(self, line: Span, column: int) -> int | None:
        """Return the character in a column of a line; None behind its end."""
        first, end = line
        cell = self.cell_C[first] + column
        at = int(np.searchsorted(self.cell_C, cell, "right")) - 1
        return at if at < end else None

    def find(self, words: str, start: int, *, backwards: bool = False) -> Span | None:
        """Find words, in any case, from a character on, or before it; past the end from the other one."""
        wanted = "".join(map(_lower, words))
        if backwards:
            at = self.folded.rfind(wanted, 0, max(0, start + len(wanted) - 1))
            at = self.folded.rfind(wanted) if at < 0 else at
        else:
            at = self.folded.find(wanted, start)
            at = self.folded.find(wanted) if at < 0 else at
        return None if at < 0 or not wanted else (at, at + len(wanted))


def _lower(character: str) -> str:
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
