"""Completion of settings in a shell."""

from collections.abc import Callable, Mapping

from sfi_cli.settings.text import NONE
from sfi_core.settings.fields import Setting


def completer(known: Mapping[str, Setting]) -> Callable[[str], list[tuple[str, str]]]:
    """Return the function that completes `NAME=VALUE` of these settings."""
    return lambda incomplete: completions(incomplete, known)


def names(known: Mapping[str, Setting]) -> Callable[[str], list[tuple[str, str]]]:
    """Return the function that completes the name of one of these settings."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        return [(name, one.brief) for name, one in known.items() if name.startswith(incomplete)]

    return complete


def completions(incomplete: str, known: Mapping[str, Setting]) -> list[tuple[str, str]]:
    """Complete a name, or after `=` the value of a setting with choices; each with its meaning."""
    name, equals, _ = incomplete.partition("=")
    if not equals:
        found = [(f"{full}=", one.brief) for full, one in known.items()]
    else:
        found = [(f"{name}={value}", "") for value in _values(known.get(name))]
    return [(text, meaning) for text, meaning in found if text.startswith(incomplete)]


def _values(setting: Setting | None) -> tuple[str, ...]:
    if setting is None:
        return ()
    values = ("true", "false") if setting.kind is bool else setting.choices
    return (*values, NONE) if setting.optional else values
