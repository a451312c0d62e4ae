"""Decodes tokens to text, all at once or one by one."""

import re
from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, without the special ones."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class TextStream:
    """The text of one request, which adds up to `text_of` all its tokens; a split character comes with its last token.

    A token's text depends on the tokens before it, such as whether a space is stripped. So each text is
    decoded with the tokens of the text before it, and that one's part is cut off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._told: list[int] = []  # the tokens of the last text
        self._waiting: list[int] = []
        self._held = ""  # the text that waits

    def push(self, token_id: int) -> str:
        """Return the text that a token adds; it may come with a later token, or at the `end`."""
        self._waiting.append(token_id)
        before, text = (text_of(self._tokenizer, ids) for ids in (self._told, [*self._told, *self._waiting]))
        held, self._held = self._held, text[len(before) :]
        # a byte may be part of a character, or make the bytes before it none; a special token changes neither
        if self._held == held or text.endswith(REPLACEMENT) or self._is_byte(token_id):
            return ""
        self._told, self._waiting = self._waiting, []
        return self.end()

    def end(self) -> str:
        """Return the text that still waits, such as that of a character whose last token did not come."""
        text, self._held = self._held, ""
        return text

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and BYTE.fullmatch(token) is not None
