"""Where prompts come from: an argument, a file, stdin, a JSON Lines file, or the bundled example."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.config import SfiConfig

STDIN = "-"
Entry = str | list[dict[str, Any]]  # a text, or chat messages


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts and what belongs to them.

    Attributes:
        entries: Texts or chat messages.
        max_new_tokens: The most new tokens of each, None where its line says nothing; empty without a file.
        config: The settings they are run with when nothing else is said.
        expected: The right answer, for the bundled example.
    """

    entries: list[Entry]
    config: SfiConfig
    expected: str | None = None
    max_new_tokens: tuple[int | None, ...] = ()

    def limits(self, default: int) -> list[int]:
        """Return the most new tokens of each entry; `default` where its line says nothing."""
        own = self.max_new_tokens or (None,) * len(self.entries)
        return [default if limit is None else limit for limit in own]

    @property
    def is_example(self) -> bool:
        """Whether this is the bundled example."""
        return self.expected is not None


def read_prompts(argument: str | None, file: Path | None, batch: Path | None) -> Prompts:
    """Read the prompts of a command.

    Raises:
        ConfigError: Two sources are given.
        InputError: A file cannot be read, or a line of it is malformed.
    """
    given = [source for source in (argument, file, batch) if source is not None]
    if len(given) > 1:
        raise ConfigError(f"prompt must have one source, got {len(given)}")
    if batch is not None:
        lines = _read_batch(batch)
        entries, limits = [entry for entry, _ in lines], tuple(limit for _, limit in lines)
        return Prompts(entries, SfiConfig(), max_new_tokens=limits)
    if not given:
        return _example()
    text = argument
    if argument == STDIN or file == Path(STDIN):
        text = sys.stdin.read()
    elif file is not None:
        text = _read(file)
    if not text:
        raise InputError("prompt must not be empty, got an empty text")
    return Prompts([text], SfiConfig())


def _example() -> Prompts:
    from sfi_core.bundled.example import load_example

    example = load_example()
    return Prompts([example.prompt], example.config, example.answer)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"prompt file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"prompt file {path} is not UTF-8: {error.reason}") from error


def _read_batch(path: Path) -> list[tuple[Entry, int | None]]:
    lines = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            lines.append(_entry(line, f"{path}, line {number}"))
    if not lines:
        raise InputError(f"batch {path} must have at least one prompt, got none")
    return lines


def _entry(line: str, where: str) -> tuple[Entry, int | None]:
    # the prompt, and the most new tokens if the line says so
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    if isinstance(data, dict):
        limit = data.get("max_new_tokens")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InputError(
                f"{where}: max_new_tokens must be a positive number, got {json.dumps(limit)}"
            )
        if isinstance(data.get("prompt"), str) and data["prompt"]:
            return str(data["prompt"]), limit
        messages = data.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
            return messages, limit
    raise InputError(
        f'{where}: must hold a non-empty "prompt" or "messages", got {line.strip()[:60]}'
    )


def token_ids(entry: Entry, tokenizer: Any, *, chat: bool) -> list[int]:
    """Return the tokens of an entry, in the chat template where it is a conversation or `chat` says so.

    Raises:
        InputError: The tokenizer has no chat template.
    """
    if isinstance(entry, str) and not chat:
        plain: list[int] = tokenizer(entry)["input_ids"] if entry else []
        return plain
    messages = [{"role": "user", "content": entry}] if isinstance(entry, str) else entry
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the model's tokenizer must have a chat template for --chat and messages")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    # the template writes the special tokens itself: another one at the beginning would come twice
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
