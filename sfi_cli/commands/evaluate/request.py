"""What `sfi eval` was asked, as plain values that a results folder keeps and a resumed run compares."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sfi_cli import parsing
from sfi_cli.settings.tables import settings_for
from sfi_core.errors import ConfigError
from sfi_core.settings.engine import EngineOptions

METHODS = (
    "full-kv", "default=sfi", "paper=sfi@paper", "released=sfi@released", "streaming-llm", "snapkv", "h2o",
    "tova", "quest", "tidaldecode", "freekv", "synckv", "codescan", "oracle-top-k", "random-k",
)  # fmt: skip
BUNDLED_ONLY = ("synckv",)  # needs a head file, which other models seldom come with
SHARES, LENGTHS, SAMPLES, SEED, RECENT = (0.05, 0.1, 0.15, 0.25), (1024, 4096), 20, 0, 128
TOKENS = 128
FREE = ("batch_size", "weights")  # change no row, so that a resumed run may change them
DEFAULTS: dict[str, Any] = {
    "model": None, "dtype": "auto", "methods": list(METHODS),
    "shares": list(SHARES), "budgets": None, "recent": RECENT, "tasks": None, "lengths": list(LENGTHS),
    "samples": SAMPLES, "seed": SEED, "fidelity": None, "tokens": TOKENS, "harness": None, "limit": None,
    **{name.rpartition(".")[2]: one.default for name, one in settings_for("eval").items()},
}  # fmt: skip


def filled(given: Mapping[str, Any]) -> dict[str, Any]:
    """Lay what was given over the defaults; tasks only where nothing else is measured.

    Raises:
        ConfigError: Shares and budgets, or an option of fidelity or harness without it.
    """
    said = {name: value for name, value in given.items() if value is not None}
    asked = DEFAULTS | said
    if asked["model"] is not None and "methods" not in said:
        asked["methods"] = [name for name in METHODS if name not in BUNDLED_ONLY]
    if "budgets" in said:
        if "shares" in said:
            raise ConfigError("share and budget must not come together, got both")
        asked["shares"] = None
    for name, of in (
        ("tokens", "fidelity"),
        ("windows", "fidelity"),
        ("include_path", "harness"),
        ("limit", "harness"),
    ):
        if name in said and of not in said:
            raise ConfigError(f"{name} must come with --{of}, got it alone")
    if "shares" in said and "harness" in said and not {"tasks", "fidelity"} & said.keys():
        raise ConfigError("harness takes --budget, since its prompts differ in length, got --share")
    if asked["tasks"] is None:
        other = asked["fidelity"] is not None or asked["harness"] is not None
        asked["tasks"] = [] if other else default_tasks(asked["model"])
    return asked


def default_tasks(model: str | None) -> list[str]:
    """Name the bundled checkpoint's own task, or those for any other model."""
    from sfi_core.measure.evaluation.tasks import TASKS

    own = ["bundled-recall"]
    return own if model is None else [name for name, task in TASKS.items() if not task.bundled]


def resumed(given: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a folder was asked, where what is given now does not contradict it.

    Raises:
        ConfigError: It does, with the option; or the folder was asked what this version does not know.
    """
    for name in before:
        if name not in DEFAULTS:
            raise ConfigError(
                f"results folder must be of options that this sfi knows, got {name} {before[name]}"
            )
    for name, value in given.items():
        if name in FREE:
            continue
        kept = before.get(
            name, DEFAULTS[name]
        )  # a folder of an earlier version lacks newer options
        if value is not None and value != kept:
            option = OPTIONS.get(name, name).replace("_", "-")
            raise ConfigError(
                f"resume must keep the folder's {option} {_shown(kept)}, got {_shown(value)}"
            )
    free = {name: given[name] for name in FREE if given.get(name) is not None}
    return DEFAULTS | dict(before) | free


OPTIONS = {
    name: name.removesuffix("s") for name in ("methods", "shares", "budgets", "tasks", "lengths")
}


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def numbers(option: str, text: str | None, kind: Callable[[str], Any]) -> list[Any] | None:
    """Read a comma list of ints or floats.

    Raises:
        ConfigError: A word of it is none, or there is none.
    """
    if text is None:
        return None
    noun = "whole numbers" if kind is int else "numbers"
    rule = f"{option} must be {noun} with commas between"
    found = parsing.numbers([text], kind, rule, got=text)
    if not found:
        raise ConfigError(f"{rule}, got {text!r}")
    return found


def parts_of(asked: Mapping[str, Any], text: str | None) -> list[Any]:
    """Make what is to be run: a grid of tasks, one of windows of the text, one of harness tasks.

    Raises:
        ConfigError: A method, size, task or length that is none.
        BackendError: Harness tasks without the harness.
    """
    methods, sizes = methods_of(asked), sizes_of(asked)
    parts: list[Any] = []
    lengths = tuple(asked["lengths"])
    if asked["tasks"]:
        from sfi_core.measure.evaluation.runner import TaskGrid

        seeds = range(asked["seed"], asked["seed"] + asked["samples"])
        parts.append(
            TaskGrid(
                methods=methods, sizes=sizes, tasks=tuple(asked["tasks"]), lengths=lengths, seeds=tuple(seeds)
            )
        )  # fmt: skip
    if text is not None:
        from sfi_core.measure.evaluation.text_grid import TextGrid

        parts.append(
            TextGrid(
                methods=methods, sizes=sizes, text=text, lengths=lengths, tokens=asked["tokens"],
                count=asked["windows"],
            )
        )  # fmt: skip
    if asked["harness"]:
        from sfi_core.measure.evaluation.harness_grid import HarnessGrid

        folder = asked["include_path"]
        parts.append(
            HarnessGrid(
                methods=methods, sizes=() if asked["budgets"] is None else sizes,
                tasks=tuple(asked["harness"]), include_path=None if folder is None else Path(folder),
                limit=asked["limit"], lengths=lengths,
            )
        )  # fmt: skip
    return parts


def methods_of(asked: Mapping[str, Any]) -> tuple[Any, ...]:
    """Read the methods."""
    from sfi_core.measure.evaluation.method import Method

    return tuple(Method.parse(text) for text in asked["methods"])


def sizes_of(asked: Mapping[str, Any]) -> tuple[Any, ...]:
    """Make the sizes of shares, or of budgets."""
    from sfi_core.measure.evaluation.method import Size

    recent = asked["recent"]
    if asked["budgets"] is not None:
        return tuple(Size(budget=budget, recent=recent) for budget in asked["budgets"])
    return tuple(Size(share=share, recent=recent) for share in asked["shares"])


def weights_of(asked: Mapping[str, Any]) -> dict[str, float]:
    """Read the weights of tasks in the average.

    Raises:
        ConfigError: Another form, a task twice or not asked for, or a weight that is not positive.
    """
    text, weights = asked.get("weights"), {}
    for part in parsing.words([text] if text else None):
        task, equals, written = part.partition("=")
        if task.strip() not in asked["tasks"]:
            raise ConfigError(
                f"eval.weights must be of tasks among {','.join(asked['tasks'])}, got {task.strip()}"
            )
        try:
            weight = float(written) if equals and task.strip() not in weights else math.nan
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"eval.weights must be TASK=NUMBER, positive and once each, got {part}"
            )
        weights[task.strip()] = weight
    return weights


def engine_of(asked: Mapping[str, Any]) -> EngineOptions:
    """Make the engine's options.

    Raises:
        ConfigError: No such device budget.
    """
    asked = DEFAULTS | dict(asked)
    return EngineOptions(kv_device_budget=asked["kv_device_budget"], kv_page=asked["kv_page"])


def described(methods: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Say what the methods are, for the manifest; a preset may be another tomorrow."""
    return [
        {
            "label": method.label,
            "policy": method.policy,
            "preset": method.preset,
            "settings": dict(method.settings),
            "config": method.config.to_dict(),
        }
        for method in methods
    ]
