"""The options of `sfi eval` as plain values, which a results folder keeps and a resumed run compares."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sfi_cli import parsing
from sfi_cli.settings.tables import settings_for
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
FREE = "batch_size"  # has no effect on a row: a resumed run may change it
DEFAULTS: dict[str, Any] = {
    "model": None, "dtype": "auto", "methods": list(METHODS),
    "shares": list(SHARES), "budgets": None, "recent": RECENT, "tasks": None, "lengths": list(LENGTHS),
    "samples": SAMPLES, "seed": SEED, "fidelity": None, "tokens": TOKENS,
    **{name.rpartition(".")[2]: one.default for name, one in settings_for("eval").items()},
}  # fmt: skip
SHOWN = 3  # differences named in the message
Facts = Mapping[str, Any]


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fill the defaults in; with `fidelity`, no task is a default.

    Raises `ConfigError` for shares together with budgets, or an option of fidelity without `fidelity`.
    """
    said = {name: value for name, value in given.items() if value is not None}
    asked = DEFAULTS | said
    if asked["model"] is not None and "methods" not in said:
        asked["methods"] = [name for name in METHODS if name not in BUNDLED_ONLY]
    if "budgets" in said:
        if "shares" in said:
            raise ConfigError("share and budget must not come together, got both")
        asked["shares"] = None
    for name in ("tokens", "windows"):
        if name in said and "fidelity" not in said:
            raise ConfigError(f"{name} must come with --fidelity, got it alone")
    if asked["tasks"] is None:
        from sfi_core.measure.evaluation.tasks import TASKS

        others = [name for name, task in TASKS.items() if not task.bundled]
        asked["tasks"] = [] if asked["fidelity"] else ["bundled-recall"] if asked["model"] is None else others
    return asked


def resumed(given: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the folder's first run (`before`) for a run that resumes it.

    Raises `ConfigError` if an option given now differs from the folder's, or the folder has an unknown option.
    """
    for name in before:
        if name not in DEFAULTS:
            raise ConfigError(f"results folder must be of options that this sfi knows, got {name} {before[name]}")
    for name, value in given.items():
        if name == FREE:
            continue
        # a folder of an earlier version lacks newer options
        kept = before.get(name, DEFAULTS[name])
        if value is not None and value != kept:
            option = name.removesuffix("s") if name in LISTS else name.replace("_", "-")
            raise ConfigError(f"resume must keep the folder's {option} {_shown(kept)}, got {_shown(value)}")
    size = given.get(FREE)
    return DEFAULTS | dict(before) | ({} if size is None else {FREE: size})


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    """Read a comma list of ints or floats; raise `ConfigError` for another word or an empty list."""
    if text is None:
        return None
    noun = "whole numbers" if kind is int else "numbers"
    rule = f"{option} must be {noun} with commas between"
    found = parsing.numbers([text], kind, rule, got=text)
    if not found:
        raise ConfigError(f"{rule}, got {text!r}")
    return found


def parts_of(asked: Mapping[str, Any], text: str | None) -> list[Any]:
    """Make the grids to run, of tasks and of windows of the text; raise `ConfigError` for an invalid one."""
    common = {"methods": methods_of(asked), "sizes": sizes_of(asked), "lengths": tuple(asked["lengths"])}
    parts: list[Any] = []
    if asked["tasks"]:
        from sfi_core.measure.evaluation.runner import TaskGrid

        seeds = range(asked["seed"], asked["seed"] + asked["samples"])
        parts.append(TaskGrid(**common, tasks=tuple(asked["tasks"]), seeds=tuple(seeds)))
    if text is not None:
        from sfi_core.measure.evaluation.text_grid import TextGrid

        parts.append(TextGrid(**common, text=text, tokens=asked["tokens"], count=asked["windows"]))
    return parts


def methods_of(asked: Mapping[str, Any]) -> tuple[Any, ...]:
    """Parse the methods."""
    from sfi_core.measure.evaluation.method import Method

    return tuple(Method.parse(text) for text in asked["methods"])


def sizes_of(asked: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make the sizes from the budgets, or without budgets from the shares."""
    from sfi_core.measure.evaluation.method import Size

    recent = asked["recent"]
    if asked["budgets"] is not None:
        return tuple(Size(budget=budget, recent=recent) for budget in asked["budgets"])
    return tuple(Size(share=share, recent=recent) for share in asked["shares"])


def engine_of(asked: Mapping[str, Any]) -> EngineOptions:
    """Make the engine's options; raise `ConfigError` for an invalid device budget."""
    asked = DEFAULTS | dict(asked)
    names = ("backend", "prefill_chunk", "kv_device_budget", "kv_page")
    return EngineOptions(**{name: asked[name] for name in names})


def described(methods: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Describe the methods for the manifest, with all settings: a preset may change between versions."""
    names = ("label", "policy", "preset")
    return [
        {name: getattr(method, name) for name in names}
        | {"settings": dict(method.settings), "config": method.config.to_dict()}
        for method in methods
    ]


def check_same(facts: Facts, manifest: Facts, names: Sequence[str]) -> None:
    """Raise `ConfigError` with the first differences if facts of these names are not those of the folder."""
    for what in names:
        one, other = (dict(_leaves(_labeled(given[what]))) for given in (facts, manifest))
        differ = [name for name in other | one if one.get(name) != other.get(name)]
        if differ:
            kept, found = (
                ", ".join(f"{name} {_leaf(name, leaves)}".strip() for name in differ[:SHOWN]) for leaves in (other, one)
            )
            more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
            ours, theirs = versions().get("sfi"), manifest["versions"].get("sfi")
            since = f"; the folder is of sfi {theirs}, this is {ours}" if ours != theirs else ""
            raise ConfigError(f"resume must keep the folder's {what} {kept}{more}, got {found}{more}{since}")


def _labeled(value: Any) -> Any:
    # a list of methods by their labels, with their order
    if not isinstance(value, list):
        return value
    order = {str(number): one["label"] for number, one in enumerate(value)}
    return order | {one["label"]: one for one in value}


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    # each plain value by its path
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _leaf(name: str, facts: Facts) -> str:
    return json.dumps(facts[name]) if name in facts else "absent"
