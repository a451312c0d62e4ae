"""Decodes tokens to text one by one."""

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one request; a character split over tokens comes with its last token.

    A token's text depends on the tokens before it, such as whether a space is stripped. So each text is
    decoded with the tokens of the text before it, and that one's part is cut off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._told: list[int] = []  # the tokens of the last text
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that a token adds."""
        self._waiting.append(token_id)
        before, text = self._decoded(self._told), self._decoded([*self._told, *self._waiting])
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        self._told, self._waiting = self._waiting, []
        return text[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
