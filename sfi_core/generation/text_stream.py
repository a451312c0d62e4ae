"""Decodes tokens to text one by one."""

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
INVALID_PREFIX = "Invalid prefix"  # beginning of the message of an untyped error of `tokenizers`


def text_stream(tokenizer: Any) -> "FastTextStream | SlowTextStream":
    """Make the stream of one request's text; a character split over tokens comes with its last token."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return FastTextStream(backend) if isinstance(backend, Tokenizer) else SlowTextStream(tokenizer)


class FastTextStream:
    """Decodes with a tokenizer of the `tokenizers` package."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def push(self, token_id: int) -> str:
        """Return the text that a token adds."""
        self._waiting.append(token_id)
        try:
            piece = self._stream.step(self._backend, token_id)
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # invalid UTF-8: the decoder would change text that has been returned, so the waiting tokens start
            # a new text
            self._stream = DecodeStream(skip_special_tokens=True)
            piece = self._stream.step(self._backend, self._waiting)
        if piece is None:
            return ""
        self._waiting.clear()
        text: str = piece
        return text


class SlowTextStream:
    """Decodes with a tokenizer written in Python, the whole current line for each token."""

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
