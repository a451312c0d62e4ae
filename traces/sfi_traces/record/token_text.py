"""Texts of tokens, which join to the text."""

from typing import Any, Self

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MOST = 4  # bytes of a character: so many replacements in a row are no beginning of one


class TokenText:
    """Text of one token after the other. A character that is split over tokens comes with its last token.

    The tokens before have an empty text. A character that the sequence's end cuts off is left out.
    """

    def __init__(self, tokenizer: Any, whole: dict[int, str | None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._whole: dict[int, str | None] = {} if whole is None else whole
        self._parts: list[int] = []  # tokens of a character that is not whole yet

    def another(self) -> Self:
        """Begin another sequence of this tokenizer's tokens."""
        return type(self)(self._tokenizer, self._whole)

    def __call__(self, token_id: int) -> str:
        """Return what the sequence's next token adds to its text."""
        parts, whole = self._parts, self._look_up(token_id)
        if whole is not None:
            self._parts = []
            return self._decode(parts) + whole if parts else whole
        parts.append(token_id)
        text = self._decode(parts)
        if text.endswith(REPLACEMENT) and not text.endswith(MOST * REPLACEMENT):
            return ""
        self._parts = []
        return text

    def alone(self, token_id: int) -> str:
        """Return the text of a token by itself: U+FFFD stands for a part of a character."""
        whole = self._look_up(token_id)
        return self._decode([token_id]) if whole is None else whole

    def _look_up(self, token_id: int) -> str | None:
        # None for a token with only some bytes of a character
        if token_id not in self._whole:
            alone = self._decode([token_id])
            # SentencePiece drops a text's first space: take what a second copy of the token adds
            whole = None if REPLACEMENT in alone else self._decode([token_id, token_id])[len(alone) :]
            self._whole[token_id] = whole
        return self._whole[token_id]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
