"""Prompts as token ids, and their limits."""

from collections.abc import Sequence
from typing import Any

from sfi_core.errors import ConfigError, InputError
from sfi_core.machine.text import first_line


def encode(tokenizer: Any, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
    """Turn prompts into token ids.

    Raise `InputError` for no prompt, or one without a token, and `ConfigError` if a text needs a tokenizer.
    """
    if not prompts:
        raise InputError("prompts must not be empty, got none")
    rows = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            if tokenizer is None:
                raise ConfigError("text prompts need a tokenizer, got none; pass token ids")
            ids: list[Any] = text_ids(tokenizer, prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise InputError(f"prompt {number} must have at least one token, got none")
        rows.append(ids)
    return rows


def text_ids(tokenizer: Any, text: str, *, special: bool = True) -> list[int]:
    """Return a text's tokens, with the tokenizer's `special` ones; raise `InputError` for text that is no Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"prompt must be Unicode, got half of a character at {error.start:,}") from error
    more = {} if special else {"add_special_tokens": False}
    ids: list[int] = tokenizer(text, **more)["input_ids"] if text else []
    return ids


def chat_text(tokenizer: Any, messages: Sequence[Any]) -> str:
    """Fill the chat template, which writes the special tokens itself; raise `InputError` if it is broken."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # it is a program of the checkpoint's, and may raise anything
        raise InputError(f"the model's chat template cannot be filled: {first_line(error)}") from error


def token_limits(max_new_tokens: int | Sequence[int], prompts: int) -> list[int]:
    """Return the most new tokens of each prompt; raises `ConfigError` unless each has a positive one."""
    limits = [max_new_tokens] * prompts if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != prompts:
        raise ConfigError(f"max_new_tokens must be one number or {prompts}, one a prompt, got {len(limits)}")
    if limits and min(limits) < 1:
        raise ConfigError(f"max_new_tokens must be positive, got {min(limits)}")
    return limits


def check_prompts(model: Any, rows: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]) -> None:
    """Raise `InputError` for a prompt that exceeds the model's positions, or a token that exceeds its vocabulary."""
    text = model.config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    tokens = max(text.vocab_size, model.get_input_embeddings().weight.shape[0])
    most = [max_new_tokens] * len(rows) if isinstance(max_new_tokens, int) else max_new_tokens
    for number, (row, new) in enumerate(zip(rows, most, strict=True)):
        if limit and len(row) + new > limit:
            raise InputError(
                f"prompt {number} and {new} new tokens must fit the model's {limit} positions, "
                f"got {len(row)} prompt tokens"
            )
        if row and not 0 <= min(row) <= max(row) < tokens:
            wrong = next(token for token in row if not 0 <= token < tokens)
            raise InputError(f"prompt {number} must have tokens below the model's {tokens:,}, got {wrong:,}")


def model_stop_ids(model: Any) -> tuple[int, ...]:
    """Return the stop tokens of the model's generation config."""
    eos = model.generation_config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def padding_id(model: Any, tokenizer: Any) -> int:
    """Return the input token for rows whose request has ended; it affects no result."""
    candidates = (getattr(tokenizer, "pad_token_id", None), model.generation_config.pad_token_id)
    return next((token for token in (*candidates, *model_stop_ids(model)) if token is not None), 0)
