"""The settings of the command line: all there are, and those of a command.

A command's settings are a preset, overridden by a config file, then by `--set` and options.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from sfi_cli.parsing import number_list, unescaped
from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import ServeTable
from sfi_core.machine.text import shown
from sfi_core.settings.config import PRESETS, SfiConfig, flat_settings, read_toml
from sfi_core.settings.engine import WEIGHTS, AuditConfig, EngineOptions, Sampling
from sfi_core.settings.fields import Setting, Table, setting, settings_of

T = TypeVar("T")
NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTable(Table):
    """What a trace holds."""

    positions: bool | None = setting(None, "Record the positions of every selection; none does so while they are few.")
    redact_text: bool = setting(False, "Keep token ids and text out of the trace.")
    spans: bool | None = setting(
        None, "Time phases inside steps, which are then not replayed; none: of steps that are not; false: none at all."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable(Table):
    """Which weights, and how they lie in memory."""

    revision: str | None = setting(None, "Branch, tag or commit on the hub.")
    weights: str = setting(
        "auto", "auto: as the file has them; floats: GGUF unpacked; int8: rounded to 8 bits, on a CPU.", choices=WEIGHTS
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTable(Table):
    """How `sfi bench` measures."""

    warm_up: int = setting(4, "Decoding steps before those that are measured.", least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastTable(Table):
    """The machine of `sfi bench --forecast`."""

    bandwidth: float | None = setting(None, "GB/s of the memory; none measures this machine's.", above=0)
    memory: float | None = setting(None, "GB of memory; none takes this machine's.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalTable(Table):
    """Details of `sfi eval`."""

    windows: int = setting(4, "Places of the text of --fidelity, evenly apart.", least=1)


TABLES: dict[str, type] = {
    "engine": EngineOptions,
    "audit": AuditConfig,
    "trace": TraceTable,
    "sampling": Sampling,
    "model": ModelTable,
    "bench": BenchTable,
    "forecast": ForecastTable,
    "eval": EvalTable,
    "serve": ServeTable,
}
DECODING = settings_of(SfiConfig)
SETTINGS: dict[str, Setting] = DECODING | {
    name: declared for table, cls in TABLES.items() for name, declared in settings_of(cls, table).items()
}
SEARCHED = (  # the dimensions of `sfi tune`, besides the triggers
    "t_max", "trigger_delay", "min_gap", "slow_start", "stride", "budget", "recent", "span",
)  # fmt: skip
REPLAYED = (
    *SEARCHED, "trigger_token_ids", "random_rate", "trigger_seed", "recent_mode", "sink", "page_size",
)  # fmt: skip
DIMENSIONS = {name: SETTINGS[name] for name in ("trigger_policy", *SEARCHED)}
GENERATING = (*DECODING, "engine", "audit", "trace", "sampling", "model")
RECORDING = ("audit.every", "trace.redact_text")
TIERS = ("engine.kv_device_budget", "engine.kv_page")
# which steps are slow, which `sfi bench` states
TRIGGERING = (
    "t_max", "min_gap", "triggers", "trigger_token_ids", "trigger_policy", "stride", "random_rate", "trigger_seed",
    "slow_start",
)  # fmt: skip
# by command: the tables and settings that have an effect on it
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": GENERATING,
    "chat": (*DECODING, "engine", "trace", "sampling", "model"),
    "trace record": GENERATING,
    "bench": (
        *(name for name in DECODING if name not in TRIGGERING),
        "engine.overlap", "engine.graphs", "engine.chained", "engine.products", "engine.backend", "engine.kv_dtype",
        *TIERS, "model", "bench", "forecast",
    ),
    "eval": ("engine.backend", "engine.kv_dtype", "engine.prefill_chunk", *TIERS, "model.revision", "eval"),
    "tune": ("engine.backend", "engine.prefill_chunk", *TIERS, "model.revision"),
    "tune heads": ("engine.backend", "engine.prefill_chunk", "model.revision"),
    "trace replay": ("trigger_policy", *REPLAYED),
    "serve": (*(name for name in DECODING if "draft." not in name), *RECORDING, "model.revision", "serve"),
}  # fmt: skip


def settings_for(command: str) -> dict[str, Setting]:
    """List the settings that have an effect on a command."""
    accepted = {*COMMANDS[command]}
    return {name: declared for name, declared in SETTINGS.items() if {name, name.partition(".")[0]} & accepted}


def places(name: str) -> list[str]:
    """List the commands on which a setting has an effect."""
    commands = [command for command in COMMANDS if name in settings_for(command)]
    return [*commands, "tune --search"] if name in DIMENSIONS else commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The settings of a command."""

    config: SfiConfig  # the settings of decoding
    values: Mapping[str, Any]  # the given settings of the other tables, by full name
    said: frozenset[str]  # names of the settings given by `--set` or an option

    def of(self, name: str) -> dict[str, Any]:
        """Return the given settings of a table."""
        prefix = f"{name}."
        return {full.removeprefix(prefix): value for full, value in self.values.items() if full.startswith(prefix)}

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
    """Collect a command's settings: the preset's (None: `base`), over them a file's, then those of `sets` and options.

    A file's tables of other commands are checked, and have no effect. Raise `ConfigError` for an unknown setting, an
    invalid one, or one given twice; `InputError` for a file that cannot be read.
    """
    config = base or SfiConfig() if preset is None else SfiConfig.preset(preset)
    values, accepted = {} if file is None else _of_file(file), settings_for(command)
    config = config.replace(**nested(values))
    said = _said(accepted, sets, options or {})
    return Given(
        config=config.replace(**nested(said)),
        values={name: value for name, value in (values | said).items() if name in accepted.keys() - DECODING.keys()},
        said=frozenset(said),
    )


def effective_settings(preset: str | None, file: Path | None, sets: Iterable[str] | None) -> dict[str, tuple[Any, str]]:
    """Return every setting's value, and what gives it: default, a preset, --config or --set; raise as `given`."""
    values = {name: (declared.default, "default") for name, declared in SETTINGS.items()}
    if preset is not None:
        preset_values = flat_settings(SfiConfig.preset(preset).to_dict())
        values |= {name: (preset_values[name], f"preset {preset}") for name in flat_settings(PRESETS[preset])}
    if file is not None:
        values |= {name: (value, "--config") for name, value in _of_file(file).items()}
    return values | {name: (value, "--set") for name, value in _said(SETTINGS, sets, {}).items()}


def _of_file(path: Path) -> dict[str, Any]:
    # checked values by full name
    values = flat_settings(read_toml(path))
    try:
        return {name: lookup(name, SETTINGS).checked(value) for name, value in values.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _said(known: Mapping[str, Setting], sets: Iterable[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in texts(known, sets, options).items():
        if options.get(name) is None:
            values[name] = value_of(known[name], value)
        else:
            values[name] = known[name].checked(unescaped(value) if name == "triggers" else value)
    return values


def texts(known: Mapping[str, Setting], sets: Iterable[str] | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Join `NAME=VALUE` and options by setting; raise `ConfigError` for one without effect here, or given twice."""
    assigned = {}
    for text in sets or ():
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals:
            raise ConfigError(f"a setting must be NAME=VALUE, got {shown(text)}")
        if name in SETTINGS and name not in known:
            others = ", ".join(f"sfi {place}" for place in places(name))
            raise ConfigError(f"{name} has no effect here, only on {others}")
        assigned[lookup(name, known).name] = value.strip()
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


def lookup(name: str, known: Mapping[str, Setting]) -> Setting:
    """Find a setting by its full name; a `ConfigError` names similar ones."""
    if name in known:
        return known[name]
    last = name.rpartition(".")[2]
    alike = [other for other in known if other.rpartition(".")[2] == last]
    alike += [other for other in get_close_matches(name, known, cutoff=0.75) if other not in alike]
    hint = f"did you mean {' or '.join(alike[:3])}?" if alike else "sfi config list has all"
    raise ConfigError(f"unknown setting {shown(name)}; {hint}")


def value_of(declared: Setting, text: str) -> Any:
    """Read a value: a bare word, `none`, numbers like `0,3,8-11`, or TOML; raise `ConfigError` for a wrong one."""
    if declared.optional and text == NONE:
        return None
    if declared.is_list and declared.kind is int and not text.startswith("["):
        return declared.checked(number_list(text, declared.name))
    if declared.kind is str and not declared.is_list and not text.startswith(('"', "'")):
        return declared.checked(text)
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also thousands of digits, or of brackets
        document = {}
    return declared.checked(document["value"] if document.keys() == {"value"} else text)


def written(value: Any) -> str:
    """Write a value as `--set` takes it."""
    if value is None or isinstance(value, str):
        return NONE if value is None else value
    if isinstance(value, tuple) and value and all(type(item) is int for item in value):
        return ",".join(map(str, value))
    return json.dumps(value, ensure_ascii=False)
