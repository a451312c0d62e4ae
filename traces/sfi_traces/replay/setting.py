"""What is replayed: a trigger with its rules, and a memory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from sfi_core.config import TRIGGER_POLICIES, SfiConfig
from sfi_core.errors import ConfigError, TraceError
from sfi_traces.reader import Trace

# what each trigger policy looks at; the others would only repeat a row
RULES: dict[str, tuple[str, ...]] = {
    "boundary": ("triggers", "t_max", "min_gap", "trigger_delay", "slow_start"),
    "t-max": ("t_max", "slow_start"),
    "stride": ("stride", "slow_start"),
    "cosine": ("cosine_threshold", "t_max", "slow_start"),
    "random": ("random_rate", "seed", "t_max", "slow_start"),
    "never": ("slow_start",),
    "always": (),
}
MEMORY = ("budget", "recent", "recent_mode", "sink", "span")
RECORDED = "recorded"

assert set(TRIGGER_POLICIES) < set(RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One counterfactual.

    Attributes:
        config: The settings; its `trigger_policy` is "t-max" under "cosine" and "random", whose slow steps
            come on top.
        trigger_token_ids: T_trig.
        triggers: What to call it.
        cosine_threshold: Under "cosine", a step is slow if its query's mean cosine with the last one is
            lower.
        random_rate: Under "random", a step's chance to be slow.
        seed: Of that chance.
    """

    config: SfiConfig
    trigger_token_ids: frozenset[int]
    triggers: str = RECORDED
    cosine_threshold: float | None = None
    random_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject thresholds and rates that are none.

        Raises:
            ConfigError: Out of range.
        """
        cosine, rate = self.cosine_threshold, self.random_rate
        if cosine is not None and not -1 <= cosine <= 1:
            raise ConfigError(f"cosine-threshold must be in [-1, 1], got {cosine}")
        if rate is not None and not 0 <= rate <= 1:
            raise ConfigError(f"random-rate must be in [0, 1], got {rate}")

    @classmethod
    def recorded(cls, trace: Trace) -> Self:
        """Return the settings that a trace was recorded with.

        Raises:
            TraceError: They are not this version's.
        """
        try:
            config = SfiConfig().replace(**trace.manifest["config"])
        except ConfigError as error:
            raise TraceError(
                f"trace {trace.path} has settings this sfi cannot read: {error}"
            ) from error
        return cls(config=config, trigger_token_ids=frozenset(trace.manifest["trigger_token_ids"]))

    @property
    def policy(self) -> str:
        """The trigger policy's name."""
        if self.cosine_threshold is not None:
            return "cosine"
        return self.config.trigger_policy if self.random_rate is None else "random"

    def to_dict(self) -> dict[str, Any]:
        """Plain values; None for what the trigger policy does not look at."""
        used = (*RULES[self.policy], *MEMORY)
        names = dict.fromkeys(name for rules in RULES.values() for name in rules)
        values = {
            name: getattr(self if hasattr(self, name) else self.config, name)
            if name in used
            else None
            for name in (*names, *MEMORY)
        }
        return {"policy": self.policy, **values}

    def same_as(self, other: Self) -> bool:
        """Say whether both are one counterfactual, whatever their trigger sets are called."""
        return self._key() == other._key()

    def _key(self) -> tuple[Any, ...]:
        values = self.to_dict()
        if values["triggers"] is not None:
            values["triggers"] = self.trigger_token_ids
        return tuple(values.values())


def grid(
    base: Setting,
    policies: Iterable[str],
    trigger_sets: Mapping[str, frozenset[int]],
    axes: Mapping[str, Sequence[Any]],
) -> list[Setting]:
    """Combine values into settings, each counterfactual once.

    Args:
        base: Gives what no axis changes.
        policies: Trigger policies.
        trigger_sets: Token ids by name; empty for those of `base`.
        axes: Values by name: fields of `SfiConfig`, `cosine_threshold`, `random_rate` and `seed`.

    Raises:
        ConfigError: An unknown policy, one that lacks its threshold or rate, or a value out of range.
    """
    sets = trigger_sets or {base.triggers: base.trigger_token_ids}
    found: dict[tuple[Any, ...], Setting] = {}
    for policy, (name, ids) in product(policies, sets.items()):
        if policy not in RULES:
            raise ConfigError(f"unknown trigger-policy {policy!r}; expected one of {tuple(RULES)}")
        for values in product(*axes.values()):
            setting = _setting(base, policy, dict(zip(axes, values, strict=True)), name, ids)
            found.setdefault(setting._key(), setting)  # noqa: SLF001 - our own class
    return list(found.values())


def _setting(
    base: Setting, policy: str, values: dict[str, Any], name: str, ids: frozenset[int]
) -> Setting:
    threshold, rate = values.pop("cosine_threshold", None), values.pop("random_rate", None)
    seed = values.pop("seed", base.seed)
    for wanted, value in (("cosine", threshold), ("random", rate)):
        if policy == wanted and value is None:
            option = "cosine-threshold" if wanted == "cosine" else "random-rate"
            raise ConfigError(f"trigger-policy {wanted} must come with --{option}, got none")
    plain = "t-max" if policy in ("cosine", "random") else policy
    return Setting(
        config=base.config.replace(trigger_policy=plain, **values),
        trigger_token_ids=ids,
        triggers=name,
        cosine_threshold=threshold if policy == "cosine" else None,
        random_rate=rate if policy == "random" else None,
        seed=seed,
    )
