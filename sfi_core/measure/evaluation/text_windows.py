"""Windows of a text, each a prompt and its continuation, and the ends of their sentences."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sfi_core.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A piece of a text.

    Attributes:
        start: The index of the window's first token in the text.
        prompt_tokens: Tokens that are read as a prompt.
        ids: The window's tokens, after the prefix that every window starts with.
    """

    start: int
    prompt_tokens: int
    ids: tuple[int, ...]


def windows(
    ids: Sequence[int], prompt_tokens: int, new_tokens: int, count: int, prefix: Sequence[int] = ()
) -> list[Window]:
    """Spread windows evenly over a text; in a short text the windows overlap.

    Every window starts with the special tokens `prefix`, which count as tokens of its prompt.

    Raises:
        InputError: The text is too short.
    """
    size = prompt_tokens + new_tokens - len(prefix)
    spare = len(ids) - size
    if spare + 1 < count or prompt_tokens <= len(prefix):
        raise InputError(
            f"text must have at least {size + count - 1} tokens for {count} windows of {prompt_tokens} "
            f"prompt and {new_tokens} new tokens, got {len(ids)}"
        )
    starts = [round(index * spare / max(1, count - 1)) for index in range(count)]
    return [
        Window(start=start, prompt_tokens=prompt_tokens, ids=(*prefix, *ids[start : start + size])) for start in starts
    ]


def text_ids(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return a text's own tokens, and the special tokens that the tokenizer puts before a text."""
    own: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    start = tokenizer.bos_token_id
    first = tokenizer("a")["input_ids"][:1]
    return own, first if start is not None and first == [start] else []


def sentence_positions(window: Window, ends: Collection[int]) -> list[int]:
    """Return for each step the tokens since the last one among `ends`, in the prompt or decoded."""
    last, found = 0, []
    for place, token in enumerate(window.ids[:-1]):
        last = place if token in ends else last
        if place >= window.prompt_tokens - 1:
            found.append(place - last)
    return found
