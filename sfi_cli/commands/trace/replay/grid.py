"""The settings to replay, from the options of `sfi trace replay`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sfi_cli.parsing import named_strings, numbers, unescaped, words
from sfi_cli.settings.tables import SETTINGS
from sfi_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayGrid:
    """The options, as the user wrote them.

    Attributes:
        policies: Trigger policies, with commas between.
        triggers: Trigger strings of one set.
        trigger_ids: Token ids of the same set, with commas between.
        trigger_sets: Other sets, each `NAME=A B C`.
        axes: Values by setting, with commas between.
    """

    policies: str | None
    triggers: list[str] | None
    trigger_ids: str | None
    trigger_sets: list[str] | None
    axes: Mapping[str, str]

    @property
    def given(self) -> bool:
        """Whether the user gave any of these options."""
        return any((self.policies, self.triggers, self.trigger_ids, self.trigger_sets, self.axes))

    def settings(self, trace: Any, *, note: Callable[[str], None]) -> list[Any]:
        """Combine the values into the settings to replay, each once.

        Raises:
            ConfigError: A value is invalid, or an option has no effect.
            TraceError: Trigger strings for a redacted trace.
        """
        from sfi_traces.replay import Setting, grid

        base = Setting.recorded(trace)
        policies = words([self.policies]) if self.policies else [base.policy]
        axes = {name: _values(name, text) for name, text in self.axes.items()}
        sets = self._sets(trace, note)
        self._check_effect(policies, {*axes, *(["triggers"] if sets else [])})
        return grid(base, policies, sets, axes)

    def _check_effect(self, policies: list[str], given: set[str]) -> None:
        from sfi_traces.replay import RULES

        for name in sorted(given):
            users = [policy for policy, used in RULES.items() if name in used]
            if users and not set(users) & set(policies):
                raise ConfigError(
                    f"{name} must come with --trigger-policy {' or '.join(users)}, "
                    f"got {','.join(policies)}"
                )

    def _sets(self, trace: Any, note: Callable[[str], None]) -> dict[str, frozenset[int]]:
        strings = named_strings(self.trigger_sets)
        ids = _values("trigger_token_ids", self.trigger_ids) if self.trigger_ids else []
        if not strings and not self.triggers and not ids:
            return {}
        from sfi_traces.replay import RecordedVocabulary

        vocabulary = RecordedVocabulary.of([trace])
        sets = {}
        if self.triggers or ids:
            name = " ".join([*(self.triggers or []), *map(str, ids)])
            sets[name] = frozenset(ids) | vocabulary.trigger_ids(unescaped(self.triggers or []))
        for name, body in strings.items():
            sets[name] = vocabulary.trigger_ids(body)
        for name, found in sets.items():
            if not found:
                note(f"note: no generated token matches the triggers {name!r}")
        return sets


def _values(name: str, text: str) -> list[Any]:
    # ints, floats or names, each once
    kind = SETTINGS[name].kind
    rule = f"{name} must be {'numbers' if kind is float else 'whole numbers'}"
    found: list[Any] = words([text]) if kind is str else numbers([text], kind, rule)
    if not found:
        raise ConfigError(f"{name} must have a value, got {text!r}")
    return list(dict.fromkeys(found))
