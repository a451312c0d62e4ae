"""A setting to replay: a trigger with its rules, and a memory; trigger strings without a tokenizer."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any, Self

from sfi_core.errors import ConfigError, TraceError, unknown
from sfi_core.policies.built_in.codescan import CodeScan
from sfi_core.settings.config import TRIGGER_POLICIES, SfiConfig
from sfi_core.triggers.trigger import build_trigger_set
from sfi_traces.model.trace import Trace

# the settings that each trigger policy uses; varying others would only repeat a row
RULES: dict[str, tuple[str, ...]] = {
    "boundary": ("triggers", "t_max", "min_gap", "trigger_delay", "slow_start"),
    "t-max": ("t_max", "slow_start"),
    "stride": ("stride", "slow_start"),
    "random": ("random_rate", "trigger_seed", "t_max", "min_gap", "slow_start"),
    "never": ("slow_start",),
    "always": (),
}
SCAN = "codescan"  # beside the trigger policies: after step 0 every step selects for itself, and is fast
SCANNED = ("budget", "recent", "recent_mode", "sink")  # what codescan uses
RULES[SCAN] = ()
RULED = tuple(dict.fromkeys(chain(*RULES.values())))
MEMORY = ("budget", "recent", "recent_mode", "sink", "span", "page_size")
PART = "\N{REPLACEMENT CHARACTER}"  # text of a token with some bytes of a character: never a trigger's
assert {*TRIGGER_POLICIES, SCAN} == set(RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting; `triggers` names the trigger set, `trigger_token_ids` is T_trig, `scans` says codescan."""

    config: SfiConfig
    trigger_token_ids: frozenset[int]
    triggers: str = "recorded"
    scans: bool = False

    @classmethod
    def recorded(cls, trace: Trace) -> Self:
        """Return the setting that a trace was recorded with; raises `TraceError` for an unknown one."""
        try:
            config = SfiConfig().replace(**trace.manifest["config"])
        except ConfigError as error:
            raise TraceError(f"trace {trace.path} has settings this sfi cannot read: {error}") from error
        ids, scans = frozenset(trace.manifest["trigger_token_ids"]), trace.manifest["policy"] == SCAN
        return cls(config=config, trigger_token_ids=ids, scans=scans)

    @property
    def policy(self) -> str:
        """The trigger policy's name, or codescan's."""
        return SCAN if self.scans else self.config.trigger_policy

    def under(self, policy: str, **changes: Any) -> Self:
        """Copy with a trigger policy, or codescan, and with other fields of the config."""
        scans = policy == SCAN
        fixed: dict[str, Any] = CodeScan.fixed if scans else {"trigger_policy": policy}
        return replace(self, config=self.config.replace(**changes | fixed), scans=scans)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; None for what the trigger policy does not use."""
        values: dict[str, Any] = dict.fromkeys((*RULED, *MEMORY))
        for name in values:
            if uses(self.policy, name):
                values[name] = self.triggers if name == "triggers" else getattr(self.config, name)
        return {"policy": self.policy, **values}

    @property
    def key(self) -> tuple[Any, ...]:
        """Hashable values that are equal for equal settings, whatever their trigger sets are called."""
        values = self.to_dict()
        if values["triggers"] is not None:
            values["triggers"] = self.trigger_token_ids
        return tuple(values.values())


def uses(policy: str, name: str) -> bool:
    """Say whether a trigger policy, or codescan, uses a setting."""
    return name in SCANNED if policy == SCAN else name in RULES[policy] or name not in RULED


def check_effect(names: Iterable[str], policies: Sequence[str]) -> None:
    """Raise `ConfigError` for a setting that none of some trigger policies uses, or an unknown policy."""
    for policy in policies:
        if policy not in RULES:
            raise unknown("trigger-policy", policy, RULES)
    for name in sorted(names):
        if not any(uses(policy, name) for policy in policies):
            users = " or ".join(rule for rule in RULES if uses(rule, name))
            raise ConfigError(f"{name} must come with --trigger-policy {users}, got {','.join(policies)}")


def grid(
    base: Setting,
    policies: Iterable[str],
    trigger_sets: Mapping[str, frozenset[int]],
    axes: Mapping[str, Sequence[Any]],
) -> list[Setting]:
    """Combine values by `SfiConfig` field into distinct settings; `base` gives what no axis changes.

    `trigger_sets` has token ids by name; none for those of `base`. Raises `ConfigError` for a value out of range.
    """
    sets = trigger_sets or {base.triggers: base.trigger_token_ids}
    settings: dict[tuple[Any, ...], Setting] = {}
    for policy, (name, ids) in product(policies, sets.items()):
        for values in product(*axes.values()):
            changes = dict(zip(axes, values, strict=True))
            setting = replace(base, trigger_token_ids=ids, triggers=name).under(policy, **changes)
            settings.setdefault(setting.key, setting)
    return list(settings.values())


class RecordedVocabulary:
    """Stands in for a tokenizer: its vocabulary is the generated tokens, the only ones that can trigger.

    Special tokens are unknown: one without letters or digits counts by its text. A part of a character has U+FFFD.
    """

    all_special_ids: list[int] = []  # noqa: RUF012 - the interface of a tokenizer

    def __init__(self, texts: Mapping[int, str]) -> None:
        self.texts = texts

    @classmethod
    def of(cls, traces: Iterable[Trace]) -> "RecordedVocabulary":
        """Collect the tokens of traces of one model; raises `TraceError` for one without texts."""
        texts: dict[int, str] = {}
        parts: dict[int, str] = {}
        for trace in traces:
            table = trace.table("steps", ["request", "step", "token_id", "token_text"])
            for column, lack in (("token_id", "is redacted"), ("token_text", "has no text of its tokens")):
                if table[column].null_count:
                    raise TraceError(f"trace {trace.path} {lack}; it can be replayed with its own triggers only")
            before = " "
            for row in table.sort_by([("request", "ascending"), ("step", "ascending")]).to_pylist():
                text = row["token_text"]
                # a part of a character, or the token with its last part
                part = not text or (not before and row["step"] > 0)
                (parts if part else texts)[row["token_id"]] = PART if part else text
                before = text
        return cls(parts | texts)

    def get_vocab(self) -> dict[str, int]:
        """Return the id of every token; a count makes equal texts distinct."""
        return {text + "\0" * rank: i for rank, (i, text) in enumerate(self.texts.items())}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the tokens whose text is the whole text."""
        return [i for i, known in self.texts.items() if known == text]

    def batch_decode(self, sequences: list[list[int]], /) -> list[str]:
        """Return the text of each sequence of ids."""
        return ["".join(self.texts[i] for i in sequence) for sequence in sequences]

    def trigger_ids(self, triggers: Sequence[str]) -> frozenset[int]:
        """Return the generated tokens that the triggers match, by the rules of a run; maybe none.

        Raises `ConfigError` for an empty trigger.
        """
        if not all(triggers):
            raise ConfigError(f"triggers must be non-empty strings, got {list(triggers)}")
        with suppress(ConfigError):  # none of them was generated
            return frozenset(build_trigger_set(self, triggers).token_ids)
        return frozenset()
