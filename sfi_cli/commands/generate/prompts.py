"""Prompts from an argument, a file, stdin, a JSON Lines file, or the bundled example; which lines lack an answer."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sfi_cli.parsing import read_pipe, read_stdin, read_text
from sfi_core.errors import ConfigError, InputError, unknown
from sfi_core.generation.prompts import chat_text, text_ids
from sfi_core.machine.text import parse_json
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import Sampling
from sfi_core.settings.fields import LARGEST

STDIN = "-"
SUFFIX = ".jsonl"  # of the answers to a batch, a line each, written as it ends
Entry = str | list[dict[str, Any]]  # a text, or chat messages


def key(name: str | int | None, number: int) -> str:
    """Return what a line and its answer are matched by: the id, or without one the line's number."""
    return f"line {number}" if name is None else f"id {name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a JSON Lines file; what it does not say is None."""

    number: int  # of the line in the file, from 1 on
    place: int  # of the prompt among the file's, from 0 on
    entry: Entry
    id: str | int | None = None
    seed: int | None = None
    temperature: float | None = None
    max_new_tokens: int | None = None

    @property
    def key(self) -> str:
        """See `key`."""
        return key(self.id, self.number)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a command."""

    entries: list[Entry]
    config: SfiConfig  # the settings to start from: the example's own, else the defaults
    expected: str | None = None  # the right answer, for the bundled example
    lines: tuple[Line, ...] = ()  # the lines of a JSON Lines file, one an entry; empty without one

    @classmethod
    def of_lines(cls, lines: Sequence[Line]) -> Self:
        """Take the lines of a JSON Lines file."""
        return cls([line.entry for line in lines], SfiConfig(), lines=tuple(lines))

    def limits(self, default: int) -> list[int]:
        """Return each entry's limit of new tokens; `default` for an entry without its own."""
        return [default if line.max_new_tokens is None else line.max_new_tokens for line in self.lines] or [default]

    def sampling(self, default: Sampling) -> Sampling | list[Sampling]:
        """Return the sampling of all entries, or of each if a line has a temperature of its own."""
        temperatures = [line.temperature for line in self.lines]
        if all(value is None for value in temperatures):
            return default
        return [default if value is None else replace(default, temperature=value) for value in temperatures]

    def seeds(self, default: int) -> int | list[int]:
        """Return the seed of one prompt, or of each line: its own, else `default` plus the line's place."""
        return [default + line.place if line.seed is None else line.seed for line in self.lines] or default


def read_prompts(argument: str | None, file: Path | None, batch: Path | None) -> Prompts:
    """Read the prompts of a command; without a source what stdin was given, or the bundled example.

    Raises `ConfigError` for two sources, `InputError` for a file that cannot be read or has a malformed line.
    """
    given = [source for source in (argument, file, batch) if source is not None]
    if len(given) > 1:
        raise ConfigError(f"prompt must have one source, got {len(given)}")
    if batch is not None:
        return Prompts.of_lines(_read_batch(batch))
    text = argument
    if not given and (text := read_pipe() or None) is None:
        from sfi_core.bundled.example import load_example

        example = load_example()
        return Prompts([example.prompt], example.config, example.answer)
    if argument == STDIN or file == Path(STDIN):
        text = read_stdin()
    elif file is not None:
        text = read_text(file, "prompt file")
    if not text:
        raise InputError("prompt must not be empty, got an empty text")
    return Prompts([text], SfiConfig())


def _read_batch(path: Path) -> list[Line]:
    lines: dict[str, Line] = {}
    for number, text in enumerate(read_text(path, "prompt file").split("\n"), 1):
        if text.strip():
            line = _line(text, f"{path}, line {number}", number, len(lines))
            if (twin := lines.setdefault(line.key, line)) is not line:
                raise InputError(f"{path}, line {number}: id must be of one line, got that of line {twin.number}")
    if not lines:
        raise InputError(f"batch {path} must have at least one prompt, got none")
    return list(lines.values())


def _line(text: str, where: str, number: int, place: int) -> Line:
    try:
        data = parse_json(text)
    except ValueError as error:
        column = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise InputError(f"{where}: not valid JSON: {column}") from error
    sources = [name for name in SOURCES if isinstance(data, dict) and data.get(name)]
    if len(sources) != 1 or not SOURCES[sources[0]](data[sources[0]]):
        raise InputError(f'{where}: must hold a non-empty "prompt" or "messages", got {text.strip()[:60]}')
    for name, value in data.items():
        if name not in SOURCES and name not in KEYS:
            raise InputError(f"{where}: {unknown('key', name, (*SOURCES, *KEYS))}")
        if name in KEYS and value is not None and not KEYS[name][1](value):
            raise InputError(f"{where}: {name} must be {KEYS[name][0]}, got {json.dumps(value)[:60]}")
    return Line(
        number=number, place=place, entry=data[sources[0]],
        **{name: value for name, value in data.items() if name in KEYS},
    )  # fmt: skip


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST


# keys of a line: its prompt, and what else it may say
SOURCES: dict[str, Callable[[Any], bool]] = {
    "prompt": lambda value: isinstance(value, str),
    "messages": lambda value: isinstance(value, list) and all(isinstance(message, dict) for message in value),
}
KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "id": ("a text or a number", lambda value: type(value) in (str, int)),
    "seed": ("a whole number", lambda value: _is_whole(value, -LARGEST)),
    "temperature": ("at least 0", lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max),
    "max_new_tokens": ("a positive number", lambda value: _is_whole(value, 1)),
}


def token_ids(entry: Entry, tokenizer: Any, *, chat: bool) -> list[int]:
    """Return an entry's tokens; messages, with `chat` a text too, need a chat template, else `InputError` is raised."""
    if isinstance(entry, str) and not chat:
        return text_ids(tokenizer, entry)
    messages = [{"role": "user", "content": entry}] if isinstance(entry, str) else entry
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("the model's tokenizer must have a chat template for --chat and messages")
    return text_ids(tokenizer, chat_text(tokenizer, messages), special=False)


def unanswered(prompts: Prompts, path: Path) -> Prompts:
    """Return the lines that a file of answers lacks; raise `InputError` for a file with other lines."""
    if not path.exists():
        return prompts
    answered = set()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and {"id", "line", "text"} <= row.keys()):
            raise InputError(f"{path}, line {number}: must be an answer of sfi generate; resume with another output")
        answered.add(key(row["id"], row["line"]))
    return Prompts.of_lines([line for line in prompts.lines if line.key not in answered])
