"""Turning tokens into text as they come."""

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decodes one request's tokens; a character split over tokens waits until it is whole."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0
        self._start = 0

    def push(self, token_id: int) -> str:
        """Return the text that a token adds."""
        self._ids.append(token_id)
        text: str = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=True)
        if text.endswith(REPLACEMENT):
            return ""
        piece, self._shown = text[self._shown :], len(text)
        if text.endswith("\n"):  # decode a line at a time, so that long texts stay cheap
            self._start, self._shown = len(self._ids), 0
        return piece
