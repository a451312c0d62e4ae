"""The text of a run in the player: scrolls, marks the tokens that a step reads, reports clicks."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from sfi_cli.commands.trace.replay import frame_view
from sfi_cli.commands.trace.replay.frame_view import blanked
from sfi_traces.model.request import Request
from sfi_traces.views.frames import sentence_begin
from sfi_traces.views.words import Passage

AHEAD, PAST, SENTENCE, CURRENT = range(4)  # a token's place
UNREAD, SINK, SELECTED, RECENT = range(4)  # why the step reads a token
PLAIN, SLOW, OTHER = range(3)  # a token of the prompt or a fast step; a slow step's; not full attention's
KINDS = 16  # pairs of the first two, times the third; 3 * KINDS stands for found words
BACKGROUND = {SINK: "#45306b", SELECTED: "#6b4f10", RECENT: "#1d4d3c"}
PLACE = {AHEAD: "dim", PAST: "", SENTENCE: "bold", CURRENT: "bold reverse"}
COLOR, FOUND = {SLOW: "#ff8a8a", OTHER: frame_view.OTHER}, "black on #ffd75f"

Kinds = npt.NDArray[np.int8]
LONGEST = 240  # characters of a passage
PARTS = {"sink": SINK, "selected": SELECTED, "recent": RECENT, "all": SELECTED}


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
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    kinds, kind_C = np.unique(codes, return_inverse=True)
    widths = np.array([cell_len(chr(kind)) for kind in kinds.tolist()])
    return np.concatenate([[0], np.cumsum(widths[kind_C])])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marks:
    """How each token looks at a step: its place, why the step reads it, which kind of step generated it."""

    place_T: Kinds
    read_T: Kinds
    kind_T: Kinds


class TextPane(ScrollView, can_focus=False):
    """The prompt and the generated text; `found` are the characters that a search has found."""

    @dataclass
    class Clicked(Message):
        """A token was clicked; `token` counts from the prompt's first."""

        token: int

    def __init__(self, layout: TextLayout, marks: Marks, **options: Any) -> None:
        """Show a text with its first marks."""
        super().__init__(**options)
        self.text, self._marks = layout, marks
        self.found: Span | None = None
        self._width = 0
        self._begins: list[int] = [0]
        self._ends: list[int] = [0]
        self._shown: int | None = None

    def mark(self, marks: Marks) -> None:
        """Replace the marks."""
        self._marks = marks
        self.refresh()

    def show_token(self, token: int) -> None:
        """Scroll a token that is outside the window into its middle."""
        self.show_character(int(self.text.start_T[token]))

    def show_character(self, character: int) -> None:
        """Scroll a character that is outside the window into its middle."""
        self._shown = character
        line = int(np.searchsorted(self._begins, character, "right")) - 1
        height = self.scrollable_content_region.height
        top = self.scroll_offset.y
        if not top <= line < top + height:
            self.scroll_to(y=max(0, line - height // 2), animate=False, immediate=True)

    def on_resize(self, event: events.Resize) -> None:
        """Break the lines anew after the width has changed."""
        width = max(1, self.scrollable_content_region.width)
        if width != self._width:
            self._width = width
            self._begins, self._ends = self.text.wrapped(width)
            self.virtual_size = Size(width, len(self._begins))
        if self._shown is not None:
            self.call_after_refresh(self.show_character, self._shown)

    def on_click(self, event: events.Click) -> None:
        """Post `Clicked` if there is a token at the place."""
        at = event.get_content_offset(self)
        if at is None or not 0 <= (line := at.y + self.scroll_offset.y) < len(self._begins):
            return
        character = self.text.character_at((self._begins[line], self._ends[line]), at.x)
        if character is not None:
            self.post_message(self.Clicked(self.text.token_at(character)))

    def render_line(self, y: int) -> Strip:
        """Draw a line of the window."""
        line = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        if not 0 <= line < len(self._begins):
            return Strip.blank(width, self.rich_style)
        begin, end = self._begins[line], self._ends[line]
        strip = Strip(self._segments(begin, end))
        return strip.adjust_cell_length(width, self.rich_style).apply_style(self.rich_style)

    def _segments(self, begin: int, end: int) -> list[Segment]:
        # a segment for each run of characters of one style
        kind = self._kinds(begin, end)
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), end - begin]
        return [
            Segment(self.text.text[begin + first : begin + last], _style(int(kind[first])))
            for first, last in pairwise(edges)
            if last > first
        ]

    def _kinds(self, begin: int, end: int) -> Kinds:
        characters = np.arange(begin, end)
        token = np.searchsorted(self.text.start_T, characters, "right") - 1
        marks = self._marks
        kind = marks.place_T[token] * 4 + marks.read_T[token] + KINDS * marks.kind_T[token]
        if self.found is not None:
            first, last = self.found
            kind = np.where((characters >= first) & (characters < last), 3 * KINDS, kind)
        return kind


def _style(kind: int) -> Style:
    generated, rest = divmod(kind, KINDS)
    if generated > OTHER:
        return Style.parse(FOUND)
    place, read = divmod(rest, 4)
    style = Style.parse(PLACE[place])
    if generated:
        style += Style(color=COLOR[generated])
    return style + Style(bgcolor=BACKGROUND[read]) if read else style


def passage_text(passage: Passage) -> Text:
    """Write a passage: its kind, its positions, the share that is read, its mass and its text."""
    mass = "" if passage.mass is None else f"  mass {passage.mass:.3f}"
    share = "" if passage.part != "selected" else f"  in {passage.share:.0%}"
    kind = Text(f" {passage.part} ", style=f"on {BACKGROUND[PARTS[passage.part]]}")
    head = Text.assemble(kind, f" {passage.first:,}-{passage.last:,}{share}{mass}")
    text = " ".join(blanked(passage.text).split())
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return head.append(f"\n{text}") if text else head


def marks_at(request: Request, step: int) -> Marks:
    """Mark the tokens for a step; a slow step reads all, so none is marked as read."""
    prompt, slow_at = request.prompt_tokens, request.steps.slow_at
    size = prompt + len(request.steps)
    place = np.full(size, AHEAD, np.int8)
    place[: prompt + step] = PAST
    place[prompt + sentence_begin(request, step) : prompt + step] = SENTENCE
    place[prompt + step] = CURRENT
    kind = np.full(size, PLAIN, np.int8)
    kind[prompt + np.array(slow_at, int)] = SLOW if len(slow_at) < len(request.steps) else PLAIN
    kind[prompt + np.array(request.disagreeing, int)] = OTHER
    read = np.full(size, UNREAD, np.int8)
    memory = request.memory
    if not memory.slow_N[step]:
        read[: memory.sink] = SINK
        for positions in request.in_force(step).values():
            read[positions] = SELECTED
        read[memory.start_N[step] : memory.length_N[step]] = RECENT
    return Marks(place_T=place, read_T=read, kind_T=kind)


def tokens_of(request: Request) -> list[str]:
    """Return the texts of prompt and generated tokens; a redacted token is its step's number."""
    texts = request.rows["token_text"].to_pylist()
    generated = [f" {step}" if text is None else text for step, text in enumerate(texts)]
    return [*request.words[: request.prompt_tokens], *generated]
