"""The search space of a tuning: settings, each with values or a range, and named trigger sets."""

from collections.abc import Iterable, Mapping, Sequence
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
SEARCHED = (  # besides the policy and the trigger sets
    "t_max", "trigger_delay", "min_gap", "slow_start", "stride", "budget", "recent", "span",
)  # fmt: skip
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
    """A trigger set.

    Attributes:
        token_ids: T_trig; for `strings` only the ids that the traces generated, all that a replay needs.
        strings: Strings that a tokenizer turns into the set; None if only ids are known.
        texts: The tokens' texts, if known.
    """

    name: str
    token_ids: frozenset[int]
    strings: tuple[str, ...] | None = None
    texts: tuple[str, ...] = ()


def recorded_set(base: Setting) -> NamedSet:
    """Return the trace's own set."""
    config = base.config
    strings = config.triggers if config.trigger_token_ids is None else None
    return NamedSet(name=base.triggers, token_ids=base.trigger_token_ids, strings=strings)


def punctuation_sets(traces: Sequence[Trace]) -> list[NamedSet]:
    """Build the punctuation sets from the generated tokens; none for a redacted trace."""
    if any(trace.manifest["redacted"] for trace in traces):
        return []
    return given_sets(traces, PUNCTUATION)


def given_sets(traces: Iterable[Trace], strings: Mapping[str, Sequence[str]]) -> list[NamedSet]:
    """Build named sets by matching strings with the generated tokens; raises as `RecordedVocabulary`."""
    vocabulary = RecordedVocabulary.of(traces)
    return [
        NamedSet(name=name, token_ids=vocabulary.trigger_ids(body), strings=tuple(body))
        for name, body in strings.items()
    ]


def distinct(sets: Iterable[NamedSet], generated: Iterable[int]) -> list[NamedSet]:
    """Drop sets that equal an earlier one on the generated tokens, and empty ones but for the first set.

    Raises `ConfigError` if two sets have one name.
    """
    known = frozenset(generated)
    by_tokens: dict[frozenset[int], NamedSet] = {}
    names: set[str] = set()
    for named in sets:
        if named.name in names:
            raise ConfigError(f"trigger-set must have a name of its own, got {named.name!r} twice")
        names.add(named.name)
        tokens = named.token_ids & known
        if tokens or not by_tokens:
            by_tokens.setdefault(tokens, named)
    return list(by_tokens.values())


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of the search: a field of `SfiConfig`, or "triggers" with names of trigger sets.

    `values` are those to try, or with `is_range` both ends of a range.
    """

    name: str
    values: tuple[Any, ...]
    is_range: bool = False

    @classmethod
    def parse(cls, name: str, text: str) -> Self:
        """Read `8,16,32`, `8:64` or one value.

        Raises `ConfigError` for no value, an invalid one, or a range that does not ascend.
        """
        low, colon, high = text.partition(":")
        if name in (POLICY, "triggers"):
            words = [word.strip() for word in text.split(",") if word.strip()]
            values: list[Any] = list(dict.fromkeys(words))
        else:
            words = [low, high] if colon else text.split(",")
            values = [_number(name, word.strip(), text) for word in words]
            if colon and values[0] > values[1]:
                raise ConfigError(f"{name} must be an ascending range LOW:HIGH, got {text}")
            values = list(dict.fromkeys(values))
        if not values:
            raise ConfigError(f"{name} must have a value, got {text!r}")
        return cls(name, tuple(values), is_range=bool(colon) and len(values) > 1)

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
        if not self.is_range:
            return value in self.values
        return bool(self.values[0] <= value <= self.values[1])


def _number(name: str, word: str, text: str) -> float:
    try:
        return float(word) if SETTINGS[name].kind is float else int(word)
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers like 8,16,32 or a range like 8:64, got {text!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The settings that a tuning may try: dimensions and trigger sets by name; `base` gives the others."""

    base: Setting
    sets: Mapping[str, NamedSet]
    axes: Mapping[str, Axis]

    @classmethod
    def of(
        cls, base: Setting, recorded: Sequence[Supports], sets: Sequence[NamedSet], given: Mapping[str, str | None]
    ) -> Self:
        """Combine given dimensions, values or ranges as `Axis.parse` reads them, with the default ones.

        The traces' supports limit the budget; the first trigger set is the trace's own.

        Raises `ConfigError` for a value that cannot run or has no effect, or if there is nothing to choose;
        `TraceError` for a budget beyond the audit's.
        """
        texts = {name: text for name, text in given.items() if text is not None}
        axes = _defaults(base, recorded, sets)
        axes |= {name: Axis.parse(name, text) for name, text in texts.items()}
        _check(base, recorded, axes, set(texts))
        policies = axes[POLICY].values
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
    ranges = {
        "t_max": (8, 128), "min_gap": (0, 16), "stride": (4, 64), "span": (0, 16),
        "budget": (few, most), "recent": (min(32, recent), recent),
    }  # fmt: skip
    axes = {
        POLICY: Axis(POLICY, (SCAN,) if base.scans else POLICIES),
        "triggers": Axis("triggers", tuple(named.name for named in sets)),
        "trigger_delay": Axis("trigger_delay", (0, 1, 2)),
        "slow_start": Axis("slow_start", (1, 2)),
    }
    for name, (first, last) in ranges.items():
        values = (first,) if first == last else (first, last)
        axes[name] = Axis(name, values, is_range=first != last)
    return {name: axes[name] for name in (POLICY, "triggers", *SEARCHED)}


def _check(base: Setting, recorded: Sequence[Supports], axes: Mapping[str, Axis], given: set[str]) -> None:
    check_effect(given, axes[POLICY].values)
    for name, axis in axes.items():
        if name not in ("triggers", POLICY):
            for value in axis.values:
                base.config.replace(**{name: value})
    for supports in recorded:
        check_budget(supports, max(axes["budget"].values))
