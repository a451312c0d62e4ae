"""Text of single tokens."""

from typing import Any

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Texts of token ids that join to a sequence's text.

    A token with only some bytes of a character has the tokenizer's own name for it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """Return a token's text."""
        if token_id not in self._known:
            self._known[token_id] = self._look_up(token_id)
        return self._known[token_id]

    def _look_up(self, token_id: int) -> str:
        alone = self._decode([token_id])
        if REPLACEMENT in alone:
            return str(self._tokenizer.convert_ids_to_tokens(token_id))
        # SentencePiece drops a text's first space: take what a second copy of the token adds
        return self._decode([token_id, token_id])[len(alone) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
