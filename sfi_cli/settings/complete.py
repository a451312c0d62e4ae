"""Completion of settings in a shell."""

import os
from collections.abc import Callable, Mapping, MutableMapping

from sfi_cli.settings.text import NONE
from sfi_core.settings.fields import Setting

NAME = "_SFI_COMPLETE_NAME"  # variable with the name of the setting whose value bash completes


def completer(known: Mapping[str, Setting]) -> Callable[[str], list[tuple[str, str]]]:
    """Return the function that completes `NAME=VALUE` of these settings."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        name = os.environ.get(NAME)
        if name is None:
            return completions(incomplete, known)
        return [(value, "") for value in _values(known.get(name)) if value.startswith(incomplete)]

    return complete


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


def take_name(environment: MutableMapping[str, str]) -> None:
    """Move `NAME=` from bash's words to the variable `NAME`: bash splits at `=` and completes the value."""
    if environment.get("_SFI_COMPLETE") != "complete_bash":
        return
    words = environment["COMP_WORDS"].split("\n")[: int(environment["COMP_CWORD"]) + 1]
    if words[-1] == "=":
        words.append("")
    if words[-4:-3] in (["--set"], ["--search"]) and words[-2] == "=":
        environment[NAME] = words[-3]
        environment["COMP_WORDS"] = "\n".join([*words[:-3], words[-1] or "''"])
        environment["COMP_CWORD"] = str(len(words) - 3)


def _values(setting: Setting | None) -> tuple[str, ...]:
    if setting is None:
        return ()
    values = ("true", "false") if setting.kind is bool else setting.choices
    return (*values, NONE) if setting.optional else values
