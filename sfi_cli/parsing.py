"""Options that are lists or texts: comma lists, ranges, named sets of strings, files."""

import codecs
import io
import re
import select
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sfi_cli.terminal.output import message
from sfi_core.errors import ConfigError, InputError
from sfi_core.machine import files
from sfi_core.machine.text import LONGEST

MOST_NUMBERS = 1 << 20  # of a range
NAMED = re.compile(r"([\w-]+)=(.+)", re.DOTALL)


def words(values: Iterable[str] | None) -> list[str]:
    """Split comma lists, and join the words of all."""
    return [word.strip() for value in values or () for word in value.split(",") if word.strip()]


def numbers(values: Iterable[str], kind: Callable[[str], Any], rule: str) -> list[Any]:
    """Read comma lists by `kind`; raise `ConfigError`, which begins with `rule`, where it raises ValueError."""
    parsed = []
    for word in words(values) or [""]:
        try:
            parsed.append(kind(word))
        except ValueError as error:
            raise ConfigError(f"{rule}, got {word!r}") from error
    return parsed


def number_list(text: str | None, option: str) -> tuple[int, ...] | None:
    """Read numbers and ranges, `0,3,8-11`; raise `ConfigError` for another text."""
    if text is None:
        return None
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        plain = all(re.fullmatch("[0-9]{1,15}", end) for end in (first, last))
        if not (plain and 0 <= int(last) - int(first) < MOST_NUMBERS):
            raise ConfigError(f"{option} must be numbers and ranges like 0,3,8-11, got {text[:LONGEST]}")
        numbers |= set(range(int(first), int(last) + 1))
    return tuple(sorted(numbers))


def named_strings(texts: Iterable[str] | None) -> dict[str, list[str]]:
    """Read trigger sets, `NAME=A B C` or only `A B C`; raise `ConfigError` if two have one name."""
    sets: dict[str, list[str]] = {}
    for text in texts or ():
        named = NAMED.fullmatch(text)
        name, body = named.groups() if named else (text, text)
        if name in sets:
            raise ConfigError(f"trigger-set must have a name of its own, got {name!r} twice")
        sets[name] = unescaped(word for word in body.split(" ") if word)
    return sets


def unescaped(triggers: Iterable[str]) -> list[str]:
    r"""Replace `\n` by newlines in trigger strings."""
    return [trigger.replace("\\n", "\n") for trigger in triggers]


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file; raise `InputError`, which calls it `what`, if that fails."""
    try:
        return files.read_text(path)
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {path} is not UTF-8: {error.reason} at byte {error.start:,}") from error


def read_pipe() -> str:
    """Read what another program or a file gives on stdin; "" for a terminal. Says so where it has to wait."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    with suppress(OSError, ValueError):  # a stream without a file, or one that cannot be waited for
        if not select.select([sys.stdin], [], [], 1.0)[0]:
            message("reading the prompt from stdin")
    return read_stdin()


def read_stdin() -> str:
    """Read the text on stdin, "" where stdin is closed; raise `InputError` for bytes of another encoding."""
    if sys.stdin is None:
        return ""
    data, encoding = sys.stdin.buffer.read(), sys.stdin.encoding
    try:
        begins = data.startswith(codecs.BOM_UTF8)
        return io.TextIOWrapper(io.BytesIO(data), "utf-8-sig" if begins else encoding).read()
    except UnicodeDecodeError as error:
        raise InputError(f"stdin is not {encoding.upper()}: {error.reason} at byte {error.start:,}") from error
