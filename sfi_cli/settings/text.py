"""Settings as text: reads and completes `NAME=VALUE`, writes values."""

import json
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from sfi_cli.parsing import number_list
from sfi_cli.settings.tables import SETTINGS, places
from sfi_core.errors import ConfigError
from sfi_core.machine.text import shown
from sfi_core.settings.fields import Setting

NONE = "none"


def assignment(text: str, known: Mapping[str, Setting]) -> tuple[Setting, str]:
    """Split `NAME=VALUE`; raise `ConfigError` for another text or a setting without effect here."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals:
        raise ConfigError(f"a setting must be NAME=VALUE, got {shown(text)}")
    if name in SETTINGS and name not in known:
        others = ", ".join(f"sfi {place}" for place in places(name))
        raise ConfigError(f"{name} has no effect here, only on {others}")
    return lookup(name, known), value.strip()


def lookup(name: str, known: Mapping[str, Setting]) -> Setting:
    """Find a setting by its full name; a `ConfigError` names similar ones."""
    if name in known:
        return known[name]
    last = name.rpartition(".")[2]
    alike = [other for other in known if other.rpartition(".")[2] == last]
    alike += [other for other in get_close_matches(name, known, cutoff=0.75) if other not in alike]
    hint = f"did you mean {' or '.join(alike[:3])}?" if alike else "sfi config list has all"
    raise ConfigError(f"unknown setting {shown(name)}; {hint}")


def value_of(setting: Setting, text: str) -> Any:
    """Read a value: a bare word, `none`, numbers like `0,3,8-11`, or a TOML value.

    Raises `ConfigError` for a value of another type than the setting's, or out of range.
    """
    if setting.optional and text == NONE:
        return None
    if setting.is_list and setting.kind is int and not text.startswith("["):
        return setting.checked(number_list(text, setting.name))
    if setting.kind is str and not setting.is_list and not text.startswith(('"', "'")):
        return setting.checked(text)
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also thousands of digits, or of brackets
        document = {}
    return setting.checked(document["value"] if document.keys() == {"value"} else text)


def written(value: Any) -> str:
    """Write a value as `--set` takes it."""
    if value is None:
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, tuple) and value and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)


def completer(known: Mapping[str, Setting]) -> Callable[[str], list[tuple[str, str]]]:
    """Return the function that completes `NAME=VALUE` of these settings."""
    return lambda incomplete: completions(incomplete, known)


def names(known: Mapping[str, Setting]) -> Callable[[str], list[tuple[str, str]]]:
    """Return the function that completes the name of one of these settings."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [(name, declared.brief) for name, declared in known.items() if name.startswith(incomplete)]

    return complete


def completions(incomplete: str, known: Mapping[str, Setting]) -> list[tuple[str, str]]:
    """Complete a name, or after `=` the value of a setting with choices; each with its meaning."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        offers = [(f"{full}=", declared.brief) for full, declared in known.items()]
    else:
        offers = [(f"{name}={value}", "") for value in _values(known.get(name))]
    return [(text, meaning) for text, meaning in offers if text.startswith(incomplete)]


def _values(setting: Setting | None) -> tuple[str, ...]:
    if setting is None:
        return ()
    values = ("true", "false") if setting.kind is bool else setting.choices
    return (*values, NONE) if setting.optional else values
