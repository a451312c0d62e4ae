"""The options of `sfi eval` as plain values, which a results folder keeps and a resumed run compares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sfi_cli import parsing
from sfi_cli.settings import settings_for
from sfi_core.errors import ConfigError
from sfi_core.machine.versions import versions
from sfi_core.settings.engine import EngineOptions
from sfi_core.settings.policy_names import built_in

PRESETS = ("sfi", "sfi@paper", "sfi@released")
UNASKED = ("prior-only",)  # the ablation of a part of sfi
METHODS = ("full-kv", *PRESETS, *(name for name in built_in() if name not in ("full-kv", "sfi", *UNASKED)))
BUNDLED_ONLY = ("synckv",)  # needs a head file, which few other models have
SHARES, LENGTHS, SAMPLES, SEED, RECENT = (0.05, 0.1, 0.15, 0.25), (1024, 4096), 20, 0, 128
TOKENS = 128
LISTS = ("methods", "shares", "budgets", "tasks", "lengths")
DEFAULTS: dict[str, Any] = {
    "model": None, "dtype": "auto", "methods": list(METHODS),
    "shares": list(SHARES), "budgets": None, "recent": RECENT, "tasks": None, "lengths": list(LENGTHS),
    "samples": SAMPLES, "seed": SEED, "fidelity": None, "tokens": TOKENS,
    **{name.rpartition(".")[2]: setting.default for name, setting in settings_for("eval").items()},
}  # fmt: skip
Facts = Mapping[str, Any]


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the defaults in; with `fidelity`, no task is a default.

    Raises `ConfigError` for shares together with budgets, or an option of fidelity without `fidelity`.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    asked = DEFAULTS | chosen
    if asked["model"] is not None and "methods" not in chosen:
        asked["methods"] = [name for name in METHODS if name not in BUNDLED_ONLY]
    if "budgets" in chosen:
        if "shares" in chosen:
            raise ConfigError("share and budget must not come together, got both")
        asked["shares"] = None
    for name in ("tokens", "windows"):
        if name in chosen and "fidelity" not in chosen:
            raise ConfigError(f"{name} must come with --fidelity, got it alone")
    if asked["tasks"] is None:
        from sfi_core.measure.evaluation.tasks import TASKS

        general = [name for name, task in TASKS.items() if not task.bundled]
        asked["tasks"] = [] if asked["fidelity"] else ["bundled-recall"] if asked["model"] is None else general
    return asked


def resumed(given: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the folder's first run (`before`) for a run that resumes it.

    Raises `ConfigError` if an option given now differs from the folder's, or the folder has an unknown option.
    """
    for name in before:
        if name not in DEFAULTS:
            raise ConfigError(f"results folder must be of options that this sfi knows, got {name} {before[name]}")
    for name, value in given.items():
        # a folder of an earlier version lacks newer options
        earlier = before.get(name, DEFAULTS[name])
        if value is not None and value != earlier:
            option = name.removesuffix("s") if name in LISTS else name.replace("_", "-")
            raise ConfigError(f"resume must keep the folder's {option} {_shown(earlier)}, got {_shown(value)}")
    return DEFAULTS | dict(before)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    """Read a comma list of ints or floats; raise `ConfigError` for another word or an empty list."""
    if text is None:
        return None
    noun = "whole numbers" if kind is int else "numbers"
    rule = f"{option} must be {noun} with commas between"
    values = parsing.numbers([text], kind, rule, got=text)
    if not values:
        raise ConfigError(f"{rule}, got {text!r}")
    return values


def engine_of(asked: Mapping[str, Any]) -> EngineOptions:
    """Make the engine's options; raise `ConfigError` for an invalid device budget."""
    asked = DEFAULTS | dict(asked)
    names = ("backend", "kv_dtype", "prefill_chunk", "kv_device_budget", "kv_page")
    return EngineOptions(**{name: asked[name] for name in names})


def check_same(facts: Facts, manifest: Facts, names: Sequence[str]) -> None:
    """Raise `ConfigError` if facts of these names are not those of the folder."""
    for name in names:
        if facts[name] != manifest[name]:
            ours, theirs = versions().get("sfi"), manifest["versions"].get("sfi")
            since = f"; the folder is of sfi {theirs}, this is {ours}" if ours != theirs else ""
            raise ConfigError(f"resume must keep the {name} in the folder's manifest.json, got another{since}")
