"""The search space of a tuning: settings, each with values or a range, and named trigger sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.fields import settings_of
from sfi_traces.model.trace import Trace
from sfi_traces.replay import RecordedVocabulary, Setting, Supports, check_effect
from sfi_traces.replay.replay import check_budget
from sfi_traces.replay.setting import SCAN, uses

POLICY, POLICIES = "trigger_policy", ("boundary", "stride", "t-max")
SETTINGS = settings_of(SfiConfig)
LOG = 8  # a range of integers with a larger ratio of its ends is searched by its logarithm
PUNCTUATION: dict[str, tuple[str, ...]] = {
    "sentence": (".", "?", "!"),
    "paper": (".", "?", "!", ";", "\n"),
    "clause": (".", "?", "!", ";", "\n", ",", ":"),
    "line": ("\n",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSet:
    """A trigger set."""

    name: str
    token_ids: frozenset[int]  # T_trig; for `strings` only the ids that the traces generated, all that a replay needs
    strings: tuple[str, ...] | None = None  # that a tokenizer turns into the set; None if only ids are known


def trigger_sets_of(
    base: Setting, traces: Sequence[Trace], given: Mapping[str, Sequence[str]], generated: set[int]
) -> list[NamedSet]:
    """Build trigger sets of strings by name, by default the base's own and, unless a trace is redacted, punctuation.

    Sets that equal an earlier one on the `generated` tokens are left out, and empty ones but for the first set.
    Raises as `RecordedVocabulary`.
    """
    sets, strings = [], given
    if not given:
        triggers = base.config.triggers if base.config.trigger_token_ids is None else None
        sets.append(NamedSet(name=base.triggers, token_ids=base.trigger_token_ids, strings=triggers))
        strings = {} if any(trace.manifest["redacted"] for trace in traces) else PUNCTUATION
    if strings:
        vocabulary = RecordedVocabulary.of(traces)
        sets += [
            NamedSet(name=name, token_ids=vocabulary.trigger_ids(body), strings=tuple(body))
            for name, body in strings.items()
        ]
    by_tokens: dict[frozenset[int], NamedSet] = {}
    for named in sets:
        tokens = named.token_ids & generated
        if tokens or not by_tokens:
            by_tokens.setdefault(tokens, named)
    return list(by_tokens.values())


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension: a field of `SfiConfig`, or "triggers" with names of sets; `values`, or both ends of a range."""

    name: str
    values: tuple[Any, ...]
    is_range: bool = False

    @classmethod
    def parse(cls, name: str, text: str) -> Self:
        """Read `8,16,32`, `8:64` or one value; raises `ConfigError` for another text, or a range that descends."""
        kind = SETTINGS[name].kind
        is_range = ":" in text and kind is not str
        words = text.split(":", 1) if is_range else text.split(",")
        try:
            values = tuple(dict.fromkeys(kind(word.strip()) for word in words))
        except ValueError as error:
            raise ConfigError(f"{name} must be numbers like 8,16,32 or a range like 8:64, got {text!r}") from error
        if is_range and values[0] > values[-1]:
            raise ConfigError(f"{name} must be an ascending range LOW:HIGH, got {text}")
        return cls(name, values, is_range=is_range and len(values) > 1)

    def suggest(self, trial: Any) -> Any:
        """Let an Optuna trial pick a value; a single value is no parameter of the trial."""
        if len(self.values) == 1:
            return self.values[0]
        if not self.is_range:
            return trial.suggest_categorical(self.name, self.values)
        low, high = self.values
        if SETTINGS[self.name].kind is float:
            return trial.suggest_float(self.name, low, high)
        return trial.suggest_int(self.name, low, high, log=low > 0 and high >= LOG * low)

    def has(self, value: Any) -> bool:
        """Say whether a value may be tried."""
        return bool(self.values[0] <= value <= self.values[1]) if self.is_range else value in self.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The settings that a tuning may try: dimensions and trigger sets by name; `base` gives the others."""

    base: Setting
    sets: Mapping[str, NamedSet]
    axes: Mapping[str, Axis]

    @classmethod
    def of(
        cls, base: Setting, recorded: Sequence[Supports], sets: Sequence[NamedSet], given: Mapping[str, str]
    ) -> Self:
        """Combine given dimensions, texts that `Axis.parse` reads, with the default ones.

        Raises `ConfigError` for a value that cannot run or has no effect, or if there is nothing to choose;
        `TraceError` for a budget beyond the audit's.
        """
        axes = _defaults(base, recorded, sets)
        axes |= {name: Axis.parse(name, text) for name, text in given.items()}
        policies = axes[POLICY].values
        check_effect(given, policies)
        for name, axis in axes.items():
            for value in () if name in ("triggers", POLICY) else axis.values:
                base.config.replace(**{name: value})
        check_budget(recorded, max(axes["budget"].values))
        used = {n: axis for n, axis in axes.items() if n == POLICY or any(uses(policy, n) for policy in policies)}
        if all(len(axis.values) == 1 for axis in used.values()):
            raise ConfigError(
                "search space must have more than one setting, got one value for every dimension; "
                "sfi trace replay shows a single one"
            )
        return cls(base=base, sets={named.name: named for named in sets}, axes=used)

    def setting(self, trial: Any) -> Setting:
        """Let an Optuna trial pick a setting: only values that its trigger policy uses."""
        policy = self.axes[POLICY].suggest(trial)
        values = {
            name: axis.suggest(trial) for name, axis in self.axes.items() if name != POLICY and uses(policy, name)
        }
        chosen = self.sets.get(values.pop("triggers", ""))
        setting = self.base.under(policy, **values)
        return setting if chosen is None else replace(setting, trigger_token_ids=chosen.token_ids, triggers=chosen.name)

    def base_values(self) -> dict[str, Any] | None:
        """Return the trial parameters of the base; None where it lies outside the space."""
        base = self.base
        outside = {"triggers": base.triggers, POLICY: base.policy}  # no fields of the config
        values = {
            name: outside[name] if name in outside else getattr(base.config, name)
            for name in self.axes
            if name == POLICY or uses(base.policy, name)
        }
        if not all(self.axes[name].has(value) for name, value in values.items()):
            return None
        return {n: v for n, v in values.items() if len(self.axes[n].values) > 1}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; ranges as LOW:HIGH."""
        return {
            name: f"{axis.values[0]}:{axis.values[1]}" if axis.is_range else list(axis.values)
            for name, axis in self.axes.items()
        }


def _defaults(base: Setting, recorded: Sequence[Supports], sets: Sequence[NamedSet]) -> dict[str, Axis]:
    longest = max(int(supports.length_N[-1]) for supports in recorded)
    top = min(supports.top for supports in recorded)
    most = max(1, min(top, longest // 4))
    few = max(1, min(most, longest // 64))
    recent = max(1, min(512, longest // 8))
    axes = (  # in the order in which a trial is asked for them
        Axis(POLICY, (SCAN,) if base.scans else POLICIES),
        Axis("triggers", tuple(named.name for named in sets)),
        _between("t_max", 8, 128),
        Axis("trigger_delay", (0, 1, 2)),
        _between("min_gap", 0, 16),
        Axis("slow_start", (1, 2)),
        _between("stride", 4, 64),
        _between("budget", few, most),
        _between("recent", min(32, recent), recent),
        _between("span", 0, 16),
    )
    return {axis.name: axis for axis in axes}


def _between(name: str, low: int, high: int) -> Axis:
    return Axis(name, (low,) if low == high else (low, high), is_range=low != high)
