"""Prompts from an argument, a file, stdin, a JSON Lines file, or the bundled example."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfi_cli.parsing import read_stdin, read_text
from sfi_core.errors import ConfigError, InputError
from sfi_core.generation.prompts import chat_text, text_ids
from sfi_core.machine.text import parse_json
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.fields import LARGEST

STDIN = "-"
Entry = str | list[dict[str, Any]]  # a text, or chat messages


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a command.

    Attributes:
        config: The settings to start from: the example's own, else the defaults.
        expected: The right answer, for the bundled example.
        max_new_tokens: Each prompt's limit, None for a line without one; empty without a JSON Lines file.
    """

    entries: list[Entry]
    config: SfiConfig
    expected: str | None = None
    max_new_tokens: tuple[int | None, ...] = ()

    def limits(self, default: int) -> list[int]:
        """Return each entry's limit of new tokens; `default` for an entry without its own."""
        own = self.max_new_tokens or (None,) * len(self.entries)
        return [default if limit is None else limit for limit in own]

    @property
    def is_example(self) -> bool:
        """Whether the prompt is the bundled example."""
        return self.expected is not None


def read_prompts(argument: str | None, file: Path | None, batch: Path | None) -> Prompts:
    """Read the prompts of a command; without a source, the bundled example.

    Raises `ConfigError` for two sources, `InputError` for a file that cannot be read or has a malformed line.
    """
    given = [source for source in (argument, file, batch) if source is not None]
    if len(given) > 1:
        raise ConfigError(f"prompt must have one source, got {len(given)}")
    if batch is not None:
        lines = _read_batch(batch)
        entries, limits = [entry for entry, _ in lines], tuple(limit for _, limit in lines)
        return Prompts(entries, SfiConfig(), max_new_tokens=limits)
    if not given:
        from sfi_core.bundled.example import load_example

        example = load_example()
        return Prompts([example.prompt], example.config, example.answer)
    text = argument
    if argument == STDIN or file == Path(STDIN):
        text = read_stdin()
    elif file is not None:
        text = read_text(file, "prompt file")
    if not text:
        raise InputError("prompt must not be empty, got an empty text")
    return Prompts([text], SfiConfig())


def _read_batch(path: Path) -> list[tuple[Entry, int | None]]:
    lines = []
    for number, line in enumerate(read_text(path, "prompt file").split("\n"), 1):
        if line.strip():
            lines.append(_entry(line, f"{path}, line {number}"))
    if not lines:
        raise InputError(f"batch {path} must have at least one prompt, got none")
    return lines


def _entry(line: str, where: str) -> tuple[Entry, int | None]:
    # the prompt, and the line's limit of new tokens
    try:
        data = parse_json(line)
    except ValueError as error:
        column = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(f"{where}: not valid JSON: {column}") from error
    if isinstance(data, dict):
        limit = data.get("max_new_tokens")
        if limit is not None and not (type(limit) is int and 1 <= limit <= LARGEST):
            raise InputError(f"{where}: max_new_tokens must be a positive number, got {json.dumps(limit)[:60]}")
        if isinstance(data.get("prompt"), str) and data["prompt"]:
            return str(data["prompt"]), limit
        messages = data.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            return messages, limit
    raise InputError(f'{where}: must hold a non-empty "prompt" or "messages", got {line.strip()[:60]}')


def token_ids(entry: Entry, tokenizer: Any, *, chat: bool) -> list[int]:
    """Return the tokens of an entry; messages, or with `chat` also a text, in the chat template.

    Raises `InputError` for a tokenizer without a chat template or with a broken one, and for a text that is no Unicode.
    """
    if isinstance(entry, str) and not chat:
        return text_ids(tokenizer, entry)
    messages = [{"role": "user", "content": entry}] if isinstance(entry, str) else entry
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the model's tokenizer must have a chat template for --chat and messages")
    return text_ids(tokenizer, chat_text(tokenizer, messages), special=False)
