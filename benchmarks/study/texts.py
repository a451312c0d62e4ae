"""Texts of eight kinds, each in two disjoint halves: `dev` for every choice, `held` for what is reported."""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from benchmarks.study.chat import chats
from benchmarks.study.listings import source_files, tables, technical
from benchmarks.study.packages import manuals, repositories
from benchmarks.study.prose import explanations, topics_prose
from sfi_core.errors import InputError
from sfi_core.measure.evaluation.fidelity import Window, ids_and_prefix

SOURCES: dict[str, Callable[[], list[str]]] = {
    "prose": topics_prose,
    "narrative": explanations,
    "code": source_files,
    "lists": tables,
    "dialogue": chats,
    "technical": technical,
    "repository": repositories,
    "manual": manuals,
}
KINDS = tuple(SOURCES)
SHORT = KINDS[:6]  # those of the front; the others are long enough for 32K
HALVES = ("dev", "held")
MOST = 480_000  # characters of a half
GOLDEN = 0.6180339887498949  # its multiples spread any number of windows evenly


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which window: the number-th of a half of a kind, at a length.

    Attributes:
        number: From 0; numbers are spread evenly over the half, whatever their count.
        kind: One of `KINDS`.
        half: One of `HALVES`.
        length: Tokens of the prompt.
    """

    number: int
    kind: str
    half: str
    length: int

    def __str__(self) -> str:
        """Name the window in a progress line."""
        return f"{self.kind}/{self.half} {self.length} no. {self.number}"

    @property
    def seed(self) -> int:
        """A number that no window of another kind or number has."""
        return self.number * len(KINDS) + KINDS.index(self.kind)

    def columns(self) -> dict[str, Any]:
        """Return what the rows of the window say of it, with the digest of the text that it is cut from."""
        return {**asdict(self), "text": text_digest(self.kind, self.half)}


@cache
def text(kind: str, half: str) -> str:
    """Return a half of a kind: every second document, in an order drawn once.

    Documents are whole topics, files, pieces of a table or subjects, and none is in both halves.

    Raises:
        InputError: The package that ships the text is not installed.
    """
    documents = _documents(kind)[HALVES.index(half) :: len(HALVES)]
    random.Random(f"{kind} {half}").shuffle(documents)
    glue = "" if kind == "dialogue" else "\n\n"
    return glue.join(documents)[:MOST]


@cache
def text_digest(kind: str, half: str) -> str:
    """Return what tells a text from that of another version of Python or of a package."""
    return hashlib.sha256(text(kind, half).encode()).hexdigest()[:12]


def window(tokenizer: Any, place: Place, new_tokens: int) -> Window:
    """Return a window of `place.length` prompt tokens and `new_tokens` more.

    The half is cut into as many pieces as it holds windows, so that windows never overlap.

    Raises:
        InputError: The half has no such window.
    """
    ids, prefix = _ids(tokenizer, place.kind, place.half)
    size = place.length + new_tokens - len(prefix)
    pieces = len(ids) // size
    if place.number >= pieces:
        raise InputError(
            f"window must be below {pieces} for {place.kind}/{place.half} at {size} tokens, got {place.number}"
        )
    spare = len(ids) - pieces * size
    start = _order(pieces)[place.number] * (size + spare // pieces)
    return Window(start=start, prompt_tokens=place.length, ids=(*prefix, *ids[start : start + size]))


def windows_of(tokenizer: Any, kind: str, half: str, size: int) -> int:
    """Return how many windows of `size` tokens a half has."""
    return len(_ids(tokenizer, kind, half)[0]) // size


@cache
def _documents(kind: str) -> list[str]:
    return SOURCES[kind]()


def _order(pieces: int) -> Sequence[int]:
    return sorted(range(pieces), key=lambda piece: (GOLDEN * piece) % 1)


@cache
def _ids(tokenizer: Any, kind: str, half: str) -> tuple[list[int], list[int]]:
    return ids_and_prefix(tokenizer, text(kind, half))
