"""Settings and presets; with `parts`, the only place where a default stands.

The defaults are the `default` preset: the paper's values (Sec. 5.1), `anchored` recents, and our own choice
where the paper is silent (`Paper gap:`).
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import ConfigError, InputError
from sfi_core.settings.parts import (
    BaselineConfig,
    SelectorConfig,
    at_least,
    check_names,
    check_types,
    require,
)

RECENT_MODES = ("anchored", "sliding")
TRIGGER_POLICIES = (
    "boundary",
    "t-max",
    "stride",
    "cosine",
    "entropy",
    "random",
    "never",
    "always",
)
GROUP_REDUCTIONS = ("power", "mean", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class SfiConfig:
    """Settings of a run.

    Attributes:
        sink: Anchor tokens kept from the start of the prompt.
        recent: Tokens of the recent window at a slow step.
        recent_mode: "anchored" freezes the window's start at the last slow step, so that no token is ever
            unranked and unread; "sliding" is the paper's. Paper gap: with "sliding", what leaves the window
            between two slow steps is in no set.
        budget: Selected tokens per KV head, the paper's K.
        t_max: Largest number of consecutive fast steps; 0 makes every step slow.
        min_gap: Decoding steps from a slow step before which a trigger does not count.
        trigger_delay: Steps between the step that Eq. 5 makes slow and the slow step. 0 is Eq. 5 (the
            boundary token is the query); 1 makes the first token after the boundary the query.
        slow_start: Steps from step 0 on that are slow. 1 is the paper (g_0 = 1); 2 lets the first generated
            token, not only the prompt's last queries, make the selection that the first sentence reads
            (docs/evaluation.md has what that is worth, as for `span` and `trigger_delay`).
        span: Evidence is max-pooled over this many positions on each side; 0 is the paper.
        trigger_policy: What makes a step slow: "boundary" (Eq. 5 and T_max), "t-max", "stride", "cosine",
            "entropy", "random", "never", "always". `t_max` holds for all but the strides and the last two,
            `min_gap` for those that look at the text or at chance.
        stride: Steps from one slow step to the next under "stride".
        cosine_threshold: Under "cosine" a step is slow if the last step's query had a lower cosine with the
            query before it, the mean over layers and query heads (LouisKV's and FreeKV's tau).
        entropy_threshold: Under "entropy" a step is slow if the last step's next-token distribution had a
            higher entropy, in nats.
        random_rate: Under "random", a step's chance to be slow.
        trigger_seed: Seeds that chance.
        triggers: Strings that end a sentence; the tokenizer turns them into token ids.
        trigger_token_ids: Explicit trigger set; wins over `triggers`.
        window_decode: Queries whose logits a decoding slow step hands to the Selector, W.
        window_prefill: The same for the last queries of the prompt.
        dense_layers: Layers left dense.
        group_reduce: How the query heads of a KV head share evidence: "power", "mean" or "max".
        selector: The Selector's hyperparameters.
        baseline: Settings of the other methods.
    """

    sink: int = 4
    recent: int = 256
    recent_mode: str = "anchored"
    budget: int = 2048
    t_max: int = 64
    min_gap: int = 0
    trigger_delay: int = 1
    slow_start: int = 2
    span: int = 10
    trigger_policy: str = "boundary"
    stride: int = 16
    cosine_threshold: float = 0.8
    entropy_threshold: float = 1.0
    random_rate: float = 0.05
    trigger_seed: int = 0
    triggers: tuple[str, ...] = (".", "?", "!", ";", "\n")
    trigger_token_ids: tuple[int, ...] | None = None
    window_decode: int = 1
    window_prefill: int = 16
    dense_layers: tuple[int, ...] = ()
    group_reduce: str = "power"
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)

    def __post_init__(self) -> None:
        """Reject settings that cannot run."""
        check_types(self)
        require(self.budget > 0, f"budget must be positive, got {self.budget}")
        require(self.recent > 0, f"recent must be positive, got {self.recent}")
        least = dict.fromkeys(
            ("sink", "t_max", "min_gap", "trigger_delay", "span", "entropy_threshold"), 0
        )
        at_least(
            self, {**least, "stride": 1, "slow_start": 1, "window_decode": 1, "window_prefill": 1}
        )
        for name, low in (("cosine_threshold", -1), ("random_rate", 0)):
            value = getattr(self, name)
            require(low <= value <= 1, f"{name} must be in [{low}, 1], got {value}")
        for name in ("dense_layers", "trigger_token_ids"):
            values = getattr(self, name) or ()
            require(
                min(values, default=0) >= 0, f"{name} must be at least 0 each, got {list(values)}"
            )
        for name, choices in (
            ("recent_mode", RECENT_MODES),
            ("trigger_policy", TRIGGER_POLICIES),
            ("group_reduce", GROUP_REDUCTIONS),
        ):
            value = getattr(self, name)
            require(value in choices, f"unknown {name} {value!r}; expected one of {choices}")
        require(
            self.window_decode == 1,
            f"window_decode must be 1 while a step decodes one token, got {self.window_decode}",
        )

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a named preset: "default" (ours), "paper" (the paper's values) or "released" (its code's).

        Raises:
            ConfigError: No such preset.
        """
        if name not in PRESETS:
            raise ConfigError(f"unknown preset {name!r}; expected one of {tuple(PRESETS)}")
        return cls().replace(**PRESETS[name])

    def replace(self, /, **changes: Any) -> Self:
        """Copy with other values; `selector` and `baseline` take a mapping of the fields to change.

        Raises:
            ConfigError: An unknown key, a value of the wrong type or out of range.
        """
        check_names(SfiConfig, changes)
        for name, kind in PARTS.items():
            if isinstance(part := changes.get(name), Mapping):
                check_names(kind, part)
                changes[name] = dataclasses.replace(getattr(self, name), **part)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)

    def to_toml(self) -> str:
        """Write every setting, for `--config`."""
        values = self.to_dict()
        tables = {name: values.pop(name) for name in PARTS}
        return _toml(values) + "".join(f"\n[{n}]\n{_toml(part)}" for n, part in tables.items())

    def merge_toml(self, path: Path) -> Self:
        """Copy with the settings of a TOML file.

        Raises:
            InputError: The file cannot be read or is no TOML; with file and line.
            ConfigError: As `replace`, with the file.
        """
        try:
            changes = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"config {path} cannot be read: {_reason(error)}") from error
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"config {path} is not valid TOML: {error}") from error
        changes.pop("provenance", None)
        try:
            return self.replace(**changes)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


PARTS = {"selector": SelectorConfig, "baseline": BaselineConfig}  # tables of a TOML file


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _toml(values: Mapping[str, Any]) -> str:
    # JSON's strings, numbers, booleans and arrays are TOML too, but for escaped surrogates and a bare DEL
    texts = {n: json.dumps(v, ensure_ascii=False) for n, v in values.items() if v is not None}
    return "".join(f"{n} = {text}\n".replace("\x7f", "\\u007f") for n, text in texts.items())


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"recent_mode": "sliding", "trigger_delay": 0, "slow_start": 1, "span": 0},
    "released": {
        "recent_mode": "sliding",
        "slow_start": 1,
        "span": 0,
        "budget": 1568,
        "min_gap": 16,
        "triggers": (".", "?", "!"),
        "selector": {
            "lambda_clip": 0.35,
            "lambda_clip_rows": 0.25,
            "alpha_soft": 1.0,
            "alpha_cross": 0.85,
            "position_weight": 0.7,
        },
    },
}
