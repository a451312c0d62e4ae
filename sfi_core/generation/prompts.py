"""Prompts as token ids, their limits, and the text of generated tokens."""

import re
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.text import first_line, shown
from sfi_core.models.rotation import most_positions

PROBE = "probe"  # a text that shows what a chat template makes of it
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of SentencePiece's byte fallback
Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]  # one or several, as text or token ids


def encode(tokenizer: Any, prompts: Prompts) -> list[list[int]]:
    """Turn prompts into token ids; a text, or a list of token ids, is one prompt.

    Raise `InputError` for no prompt, an empty one, or what is neither, `ConfigError` for a text without a tokenizer.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if isinstance(prompts, Mapping):
        raise _neither("prompts", prompts)
    rows = [_listed(prompt) for prompt in _listed(prompts)]
    if not rows:
        raise InputError("prompts must not be empty, got none")
    if all(isinstance(row, int) for row in rows):
        rows = [rows]
    return [_encoded(tokenizer, row, number) for number, row in enumerate(rows)]


def _listed(values: Any) -> Any:
    # a tensor or an array as a list, or its one number
    return values.tolist() if hasattr(values, "tolist") else values


def _encoded(tokenizer: Any, prompt: Any, number: int) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ConfigError("text prompts need a tokenizer, got none; pass token ids")
        ids = text_ids(tokenizer, prompt)
    else:  # a mapping's keys are none
        try:
            ids = list(map(index, prompt))
        except TypeError as error:
            raise _neither(f"prompt {number}", prompt) from error
    if not ids:
        raise InputError(f"prompt {number} must have at least one token, got none")
    return ids


def _neither(subject: str, given: Any) -> InputError:
    way = "; pass its input_ids" if isinstance(given, Mapping) and "input_ids" in given else ""
    return InputError(f"{subject} must be text or token ids, got {type(given).__name__}{way}")


def text_ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Return a text's tokens, with the tokenizer's `special` ones; raise `InputError` for text that is no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"prompt must be Unicode, got half of a character at {error.start:,}") from error
    more = {} if special else {"add_special_tokens": False}
    ids: list[int] = tokenizer(text, **more)["input_ids"] if text else []
    return ids


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """Fill the chat template, which writes the special tokens itself; raise `InputError` where that fails.

    A message's content may be a text, null, such as beside a tool call, or a list of text parts.
    """
    texts = [_with_text(message, number) for number, message in enumerate(messages)]
    if texts != list(messages) and _takes_parts(tokenizer):
        texts = [message if message.get("content") else text for message, text in zip(messages, texts, strict=True)]
    return _filled(tokenizer, texts)


def _with_text(message: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    # the message with the text of its parts, joined by line breaks
    if isinstance(message.get("content", ""), str):
        return message
    parts = message["content"] or []
    if not isinstance(parts, list):
        raise InputError(f"message {number} must have a text as content, got {shown(parts)}")
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InputError(f"message {number} must have parts of type 'text' with a text, got {shown(kind)}")
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _takes_parts(tokenizer: Any) -> bool:
    # whether the template writes the text of a list of parts, not Python's or JSON's list
    try:
        text = _filled(tokenizer, [{"role": "user", "content": [{"type": "text", "text": PROBE}]}])
    except InputError:
        return False
    return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text


def _filled(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # it is a program of the checkpoint's, and may raise anything
        raise InputError(f"the model's chat template cannot be filled: {first_line(error)}") from error


def check_prompts(model: Any, rows: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> None:
    """Raise `InputError` for a prompt that exceeds the model's positions, or a token that exceeds its vocabulary."""
    text = model.config.get_text_config(decoder=True)
    limit = most_positions(model.config)
    embedding = model.get_input_embeddings()
    tokens = max(text.vocab_size, getattr(embedding, "num_embeddings", None) or len(embedding.weight))
    limits = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int) else max_new_tokens
    for number, (row, new) in enumerate(zip(rows, limits, strict=True)):
        if limit and len(row) + new > limit:
            raise InputError(
                f"prompt {number} and {new} new tokens must fit the model's {limit} positions, "
                f"got {len(row)} prompt tokens"
            )
        if row and not 0 <= min(row) <= max(row) < tokens:
            wrong = next(token for token in row if not 0 <= token < tokens)
            raise InputError(f"prompt {number} must have tokens below the model's {tokens:,}, got {wrong:,}")


def text_of(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of tokens, without the special ones."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


class TextStream:
    """The text of one request, which adds up to `text_of` all its tokens; a split character comes with its last token.

    A token's text depends on those before it: each text is decoded with the tokens of the last text, which is cut off.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the tokens of the last text
        self._waiting: list[int] = []
        self._held = ""  # the text that waits

    def push(self, token_id: int) -> str:
        """Return the text that a token adds; it may come with a later token, or at the `end`."""
        self._waiting.append(token_id)
        before, text = (text_of(self._tokenizer, ids) for ids in (self._shown, [*self._shown, *self._waiting]))
        held, self._held = self._held, text[len(before) :]
        # a byte may be part of a character, or make the bytes before it none; a special token changes neither
        if self._held == held or text.endswith(REPLACEMENT) or self._is_byte(token_id):
            return ""
        self._shown, self._waiting = self._waiting, []
        return self.end()

    def end(self) -> str:
        """Return the text that still waits, such as that of a character whose last token did not come."""
        text, self._held = self._held, ""
        return text

    def _is_byte(self, token_id: int) -> bool:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and BYTE.fullmatch(token) is not None
