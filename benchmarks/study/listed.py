"""The list of methods that a part of the study compares: `methods.toml`, which a person edits."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sfi_core.errors import ConfigError, InputError
from sfi_core.measure.evaluation.grid import Method, at_sizes
from sfi_core.triggers.trigger import resolve_triggers

METHODS = Path(__file__).parent / "methods.toml"
FULL = "full-kv"


@dataclass(frozen=True, slots=True)
class Listed:
    """A method at a size, as a table of the list asks for it.

    Attributes:
        label: What tables and figures call the method.
        text: How the list writes the method, without its label; rows name the method so.
        method: The method at the size.
    """

    label: str
    text: str
    method: Method

    @property
    def share(self) -> float | None:
        """Share of the prompt that a fast step may read; None where the method says its budget."""
        return self.method.share


def read_methods(table: str, tokenizer: Any, path: Path = METHODS) -> list[Listed]:
    """Return the methods of a table at its shares, with their triggers as token ids.

    A table has `shares`, `recent` (as `sfi eval --recent`) and `methods`, each
    `LABEL=POLICY[@PRESET][:key=value,...]`.

    Raises:
        InputError: The file cannot be read or is no TOML.
        ConfigError: There is no such table, or a method cannot be parsed.
    """
    methods = []
    listed = read_table(table, path)
    for written in listed["methods"]:
        method = Method.parse(written)
        ids = resolve_triggers(tokenizer, method.config)
        resolved = replace(method, config=method.config.replace(trigger_token_ids=ids))
        sized = at_sizes([resolved], shares=listed["shares"], recent=listed["recent"])
        methods += [Listed(method.label, spec(written, method), variant) for variant in sized]
    return methods


def read_table(table: str, path: Path = METHODS) -> dict[str, Any]:
    """Return a table of the list.

    Raises:
        InputError: The file cannot be read or is no TOML.
        ConfigError: There is no such table.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"methods {path} cannot be read: {error}") from error
    if table not in tables:
        raise ConfigError(f"unknown table {table!r} of {path}; expected one of {tuple(tables)}")
    entries: dict[str, Any] = tables[table]
    return entries


def spec(written: str, method: Method) -> str:
    """Return a method's text without its label."""
    return written.strip().removeprefix(f"{method.label}=")
