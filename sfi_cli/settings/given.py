"""The settings of a command: a preset, overridden by a config file, then by `--set` and options; settings as text."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from sfi_cli.parsing import number_list, unescaped
from sfi_cli.settings.tables import DECODING, SETTINGS, TABLES, places, settings_for
from sfi_core.errors import ConfigError
from sfi_core.machine.text import shown
from sfi_core.settings.config import PRESETS, SfiConfig, flat_settings, read_toml
from sfi_core.settings.fields import Setting

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The settings of a command."""

    config: SfiConfig  # the settings of decoding
    values: Mapping[str, Any]  # the given settings of the other tables, by full name
    said: frozenset[str]  # names of the settings given by `--set` or an option

    def of(self, name: str) -> dict[str, Any]:
        """Return the given settings of a table."""
        return {
            full.removeprefix(f"{name}."): value for full, value in self.values.items() if full.startswith(f"{name}.")
        }

    def table(self, kind: type[T]) -> T:
        """Make a table: the given settings, and defaults for the others."""
        name = next(name for name, cls in TABLES.items() if cls is kind)
        return kind(**self.of(name))


def given(
    command: str,
    *,
    base: SfiConfig | None = None,
    preset: str | None = None,
    file: Path | None = None,
    sets: Iterable[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Given:
    """Collect the settings of a command.

    The config file overrides the preset (None: `base`); `--set` and options, None where not given, override
    both. A file may hold tables of other commands: they are checked, and have no effect.

    Raises `ConfigError` for a setting that is unknown, invalid, or given by `--set` and by its option; `InputError` for
    a file that cannot be read, or is no TOML.
    """
    config = base or SfiConfig()
    if preset is not None:
        config = SfiConfig.preset(preset)
    values: dict[str, Any] = {}
    if file is not None:
        values = _of_file(file)
        config = config.replace(**nested(values))
    said = _said(settings_for(command), sets, options or {})
    effective = settings_for(command).keys() - DECODING.keys()
    return Given(
        config=config.replace(**nested(said)),
        values={name: value for name, value in (values | said).items() if name in effective},
        said=frozenset(said),
    )


def effective_settings(preset: str | None, file: Path | None, sets: Iterable[str] | None) -> dict[str, tuple[Any, str]]:
    """Return the value of every setting of every command, and what gives it: default, a preset, --config or --set.

    Raise as `given`.
    """
    values = {name: (declared.default, "default") for name, declared in SETTINGS.items()}
    if preset is not None:
        preset_values = flat_settings(SfiConfig.preset(preset).to_dict())
        values |= {name: (preset_values[name], f"preset {preset}") for name in flat_settings(PRESETS[preset])}
    if file is not None:
        values |= {name: (value, "--config") for name, value in _of_file(file).items()}
    return values | {name: (value, "--set") for name, value in _said(SETTINGS, sets, {}).items()}


def _of_file(path: Path) -> dict[str, Any]:
    # checked values by full name
    values: dict[str, Any] = {}
    for name, value in read_toml(path).items():
        if isinstance(value, dict):
            values |= {f"{name}.{inner}": inner_value for inner, inner_value in value.items()}
        else:
            values[name] = value
    try:
        return {name: lookup(name, SETTINGS).checked(value) for name, value in values.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _said(known: Mapping[str, Setting], sets: Iterable[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in options.items() if value is not None}
    if "triggers" in chosen:
        chosen["triggers"] = unescaped(chosen["triggers"])
    return {
        name: known[name].checked(value) if name in chosen else value_of(known[name], value)
        for name, value in texts(known, sets, chosen).items()
    }


def texts(known: Mapping[str, Setting], sets: Iterable[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Join `NAME=VALUE` and options into texts by setting; raise `ConfigError` for one given twice."""
    assigned = {}
    for text in sets or ():
        setting, value = assignment(text, known)
        assigned[setting.name] = value
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in assigned.keys() & chosen.keys():
        raise ConfigError(f"{name} must be given once, got {name}=... and its own option")
    return assigned | chosen


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `SfiConfig` among values by full name, as its `replace` takes them."""
    changes: dict[str, Any] = {}
    for full in filter(DECODING.__contains__, values):
        table, _, name = full.rpartition(".")
        (changes.setdefault(table, {}) if table else changes)[name] = values[full]
    return changes


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
