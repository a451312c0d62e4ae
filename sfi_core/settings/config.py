"""`SfiConfig`, the settings of a run, and its presets.

The defaults are the `default` preset: the paper's values (Sec. 5.1), `recent_mode` anchored, and our own
choice where the paper is silent (`Paper gap:`). Defaults stand in this folder only.
"""

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sfi_core.errors import ConfigError, InputError, SfiError, unknown
from sfi_core.machine.files import read_text
from sfi_core.settings.fields import Table, setting

WIDEST = 1 << 16  # tokens of a page or a window: beyond, memory runs out before a model does
BETA, WEAK_BETA = -math.log(0.6) / 0.9, 0.7 * -math.log(0.6) / 0.9
RECENT_MODES = ("anchored", "sliding")
AHEAD = ("off", "half")
TRIGGER_POLICIES = ("boundary", "t-max", "stride", "random", "never", "always")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig(Table):
    """Hyperparameters of the Selector (Algorithm 2)."""

    alpha: float = setting(0.5, "Exponent of the power mean, Eq. 7. Paper gap: the released code's.", above=0, most=1)
    gamma: float = setting(0.5, "Strength of the key-norm penalty, Eq. 9. Paper gap: the released code's.", least=0)
    beta: float = setting(BETA, "Strength of global recency decay, Eq. 11. Paper gap: the released code's.", least=0)
    power: float = setting(1.8, "Curvature p of the recency decay, Eq. 11. Paper gap: the released code's.", least=1)
    eta: float = setting(0.4, "Strength of the tail brake, Eq. 11. Paper gap: the released code's.", least=0)
    lambda_clip: float = setting(0.02, "Upper bound of the prior's weight, Eq. 17.", least=0, most=1)
    alpha_soft: float = setting(0.5, "Soft-NMS strength, Eq. 21.", least=0)
    radius: int = setting(16, "Half-width of N(j), in tokens. Paper gap: the released code's.", least=0, most=WIDEST)
    alpha_cross: float = setting(0.35, "Cross-head exclusivity strength, Eq. 23.", least=0)
    temperature: float = setting(2.0, "Temperature T of Eq. 22. Paper gap: the released code's.", above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineConfig(Table):
    """Settings of Quest."""

    page: int = setting(16, "Tokens of a page under quest.", least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeKVConfig(Table):
    """Settings of FreeKV (Liu et al., 2025)."""

    page: int = setting(32, "Tokens of a page under freekv, which selects and recalls whole pages.", least=1)
    # the paper takes 0.8 for long inputs and 0.9 for long generations
    tau: float = setting(0.8, "A KV head with a query cosine below this selects anew; -1: never.", least=-1, most=1)
    first_layer_dense: bool = setting(True, "Leave the first full-attention layer dense, as the paper does.")
    ahead: str = setting(
        "off",
        "half: select for this step by a query predicted half a layer early, in place of the last step's query and its "
        "correction.",
        choices=AHEAD,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncKVConfig(Table):
    """Settings of SyncKV."""

    heads: str | None = setting(
        None,
        "File of head clusters, from `sfi tune heads`; none is heads.json in the model's folder. even takes groups "
        "of four neighbors as clusters, for random weights.",
    )
    stride: int = setting(5, "Steps from one anticipation to the next, the paper's m.", least=1)
    static: float = setting(0.5, "Share of the budget that stays selected, the paper's rho.", least=0, most=1)
    suspension: str = setting(
        "dense",
        "What representatives read between two anticipations. Paper gap: dense is Algorithm 1, line 22; "
        "sparse lets them read what their cluster reads.",
        choices=("dense", "sparse"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeScanConfig(Table):
    """Settings of `codescan`."""

    rest: float = setting(0.2, "Share of the estimated unread attention that the mean value gets.", least=0, most=1)
    ahead: str = setting(
        "off",
        "half: choose by a query predicted half a layer early, beside the layer before. off: by the step's own query.",
        choices=AHEAD,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(Table):
    """How many tokens a lossless run drafts."""

    # a verification then has 16 queries a head, which fill a GPU's tile of 32, 64 or 128 rows for groups of 2, 4 or 8
    max_tokens: int = setting(15, "Most tokens drafted before a verification.", least=1)
    adaptive: bool = setting(True, "Draft as many as pay, by the drafts accepted so far and the bytes read.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SfiConfig(Table):
    """The settings of a run; `sfi config list` shows them all."""

    sink: int = setting(4, "Anchor tokens kept from the start of the prompt.", least=0)
    recent: int = setting(256, "Tokens of the recent window at a slow step.", above=0)
    # Paper gap: with sliding, the paper's, a token that leaves the window between two slow steps is in no set
    recent_mode: str = setting(
        "anchored",
        "anchored: the window's start moves at slow steps only; sliding is the paper's.",
        choices=RECENT_MODES,
    )
    budget: int = setting(2048, "Selected tokens per KV head, the paper's K.", above=0)
    page_size: int = setting(
        1,
        "Under sfi: select single tokens (1, the paper), or whole pages (docs/evidence/granularity.md has their cost).",
        least=1,
        most=WIDEST,
    )
    t_max: int = setting(64, "Most fast steps in a row; 0: all slow.", least=0)
    # docs/evidence.md and docs/evidence/evaluation.md have what these four are worth
    min_gap: int = setting(4, "Ignore triggers for so many steps after a slow step; 0 is the paper.", least=0)
    trigger_delay: int = setting(1, "Steps by which a triggered slow step is put off; 0 is Eq. 5.", least=0)
    slow_start: int = setting(2, "How many steps are slow at the start; 1 is the paper (g_0 = 1).", least=1)
    span: int = setting(10, "Evidence is max-pooled over so many positions each side; 0: paper.", least=0, most=WIDEST)
    trigger_policy: str = setting(
        "boundary",
        "What makes a step slow; boundary is Eq. 5 and T_max. t_max is of t-max and random too, min_gap of random.",
        choices=TRIGGER_POLICIES,
    )
    stride: int = setting(16, "Steps from one slow step to the next under stride.", least=1)
    random_rate: float = setting(0.05, "Probability of a step to be slow under random.", least=0, most=1)
    trigger_seed: int = setting(0, "Seed of the trigger random and of the policy random-k.")
    triggers: tuple[str, ...] = setting((".", "?", "!", ";", "\n"), "Strings that end a sentence, made into token ids.")
    trigger_token_ids: tuple[int, ...] | None = setting(None, "Ids that end a sentence, in place of triggers.", least=0)
    window_prefill: int = setting(16, "How many of the prompt's last queries make the first selection, W.", least=1)
    dense_layers: tuple[int, ...] = setting((), "Layers that always attend densely.", least=0)
    selector: SelectorConfig = field(default_factory=SelectorConfig)
    baseline: BaselineConfig = field(default_factory=BaselineConfig)
    freekv: FreeKVConfig = field(default_factory=FreeKVConfig)
    synckv: SyncKVConfig = field(default_factory=SyncKVConfig)
    codescan: CodeScanConfig = field(default_factory=CodeScanConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)

    @classmethod
    def preset(cls, name: str) -> Self:
        """Return a preset of `PRESETS`; raises `ConfigError` for a name that is none."""
        if name not in PRESETS:
            raise unknown("preset", name, PRESETS)
        return cls().replace(**PRESETS[name])

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Return a TOML text's settings, defaults for the others; raise `ConfigError` as `replace`, and for no TOML."""
        return cls().replace(**_parsed(text, "config text", ConfigError))

    def replace(self, /, **changes: Any) -> Self:
        """Copy with other values, in tables too (`selector={"alpha": 0.4}`); raise `ConfigError` for a wrong one."""
        for name in PARTS:
            if isinstance(part := changes.get(name), Mapping):
                changes[name] = dataclasses.replace(getattr(self, name), **part)
        return dataclasses.replace(self, **changes)

    def to_toml(self) -> str:
        """Return every setting as a TOML text, for `--config`."""
        values = self.to_dict()
        tables = {name: values.pop(name) for name in PARTS}
        return toml_lines(values) + "".join(f"\n[{n}]\n{toml_lines(part)}" for n, part in tables.items())

    def merge_toml(self, path: Path) -> Self:
        """Copy with the settings of a TOML file; raise as `read_toml` and `replace`."""
        changes = read_toml(path)
        try:
            return self.replace(**changes)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error


def checked_config(config: SfiConfig | None) -> SfiConfig:
    """Return the settings of an argument, the defaults for None; raise `ConfigError` for another type."""
    if config is None:
        return SfiConfig()
    if not isinstance(config, SfiConfig):
        hint = "SfiConfig().replace(**config) takes a dict's settings"
        raise ConfigError(f"config must be an SfiConfig or None, got a {type(config).__name__}; {hint}")
    return config


# the nested tables, which are those of a TOML file too
PARTS = [part.name for part in dataclasses.fields(SfiConfig) if part.default_factory is not dataclasses.MISSING]


def changed_settings(config: Mapping[str, Any], preset: str = "default") -> dict[str, Any]:
    """Pick the settings of `to_dict` that differ from a preset's, nested ones as `selector.name`."""
    usual = flat_settings(SfiConfig.preset(preset).to_dict())
    return {name: value for name, value in flat_settings(config).items() if value != usual.get(name)}


def flat_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings to `selector.name`; tuples become lists, as in JSON."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": item for inner, item in flat_settings(value).items()}
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file's settings, without its `provenance` table; raise `InputError` for one that cannot be read."""
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"config {path} cannot be read: {reason}") from error
    return _parsed(text, f"config {path}", InputError)


def _parsed(text: str, what: str, kind: type[SfiError]) -> dict[str, Any]:
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also thousands of digits, or of brackets
        raise kind(f"{what} is not valid TOML: {error}") from error
    values.pop("provenance", None)
    return values


def toml_lines(values: Mapping[str, Any]) -> str:
    """Write values as lines of TOML, a mapping on one; without None, which TOML lacks, and infinite and NaN."""
    return "".join(f"{pair}\n" for pair in _toml_pairs(values))


def _toml_pairs(values: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} = {_toml(value)}"
        for name, value in values.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    ]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(_toml_pairs(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's strings, numbers and booleans are TOML, except for escaped surrogates and a bare DEL
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"recent_mode": "sliding", "min_gap": 0, "trigger_delay": 0, "slow_start": 1, "span": 0},
    "released": {  # SFI's released code
        "recent_mode": "sliding",
        "slow_start": 1,
        "span": 0,
        "budget": 1568,
        "min_gap": 16,
        "triggers": (".", "?", "!"),
        # Paper gap: the released code bounds lambda by 0.25 if it averages several rows of evidence, and by
        # 0.35 for a single row (a decoding step with one query head per KV head). It raises Eq. 11 to the
        # power 0.7, so its beta and eta are 0.7 times the paper's.
        "selector": {"lambda_clip": 0.25, "alpha_soft": 1.0, "alpha_cross": 0.85, "beta": WEAK_BETA, "eta": 0.7 * 0.4},
    },
    # FreeKV's two scenarios (Sec. 5.1); its budget of 2048 includes sink and recent tokens (Sec. 2.1)
    "freekv-long-input": {"sink": 128, "recent": 128, "budget": 1792},
    "freekv-long-generation": {"sink": 512, "recent": 512, "budget": 1024, "freekv": {"tau": 0.9}},
}
