"""The settings that `sfi trace replay` is asked for."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sfi_cli.commands.kernel_bench.job import words
from sfi_core.errors import ConfigError

NAMED = re.compile(r"([\w-]+)=(.+)", re.DOTALL)
OPTIONS = {"triggers": "trigger", "trigger_seed": "seed"}  # called otherwise than the setting
FLOATS, TEXTS = ("cosine_threshold", "random_rate"), ("recent_mode",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The settings that the options ask for, as they were written.

    Attributes:
        policies: Trigger policies, with commas between.
        triggers: Trigger strings of one set.
        trigger_ids: Token ids of the same set, with commas between.
        trigger_sets: More sets, `NAME=A B C`.
        axes: Values of settings, with commas between; None where the option was not given.
    """

    policies: str | None
    triggers: list[str] | None
    trigger_ids: str | None
    trigger_sets: list[str] | None
    axes: Mapping[str, str | None]

    @property
    def given(self) -> bool:
        """Whether there was any option."""
        return any((self.policies, self.triggers, self.trigger_ids, self.trigger_sets)) or any(
            value is not None for value in self.axes.values()
        )

    def settings(self, trace: Any, *, note: Callable[[str], None]) -> list[Any]:
        """Combine the values into the settings to replay, each once.

        Raises:
            ConfigError: A value that is none, or an option without effect.
            TraceError: Trigger strings for a redacted trace.
        """
        from sfi_traces.replay import Setting, grid

        base = Setting.recorded(trace)
        policies = words([self.policies]) if self.policies else [base.policy]
        axes = {name: _values(name, text) for name, text in self.axes.items() if text is not None}
        sets = self._sets(trace, note)
        self._check_effect(policies, {*axes, *(["triggers"] if sets else [])})
        return grid(base, policies, sets, axes)

    def _check_effect(self, policies: list[str], given: set[str]) -> None:
        from sfi_traces.replay import RULES

        for name in sorted(given):
            users = [policy for policy, used in RULES.items() if name in used]
            if users and not set(users) & set(policies):
                raise ConfigError(
                    f"{_option(name)} must come with --trigger-policy {' or '.join(users)}, "
                    f"got {','.join(policies)}"
                )

    def _sets(self, trace: Any, note: Callable[[str], None]) -> dict[str, frozenset[int]]:
        strings = named_strings(self.trigger_sets or [])
        ids = _values("trigger_id", self.trigger_ids) if self.trigger_ids else []
        if not strings and not self.triggers and not ids:
            return {}
        from sfi_traces.replay import RecordedVocabulary

        vocabulary = RecordedVocabulary.of([trace])
        sets = {}
        if self.triggers or ids:
            name = " ".join([*(self.triggers or []), *map(str, ids)])
            sets[name] = frozenset(ids) | vocabulary.trigger_ids(_unescaped(self.triggers or []))
        for name, body in strings.items():
            sets[name] = vocabulary.trigger_ids(body)
        for name, found in sets.items():
            if not found:
                note(f"note: no generated token matches the triggers {name!r}")
        return sets


def named_strings(texts: list[str]) -> dict[str, list[str]]:
    """Read trigger sets, `NAME=A B C` or only `A B C`.

    Raises:
        ConfigError: Two have one name.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        named = NAMED.fullmatch(text)
        name, body = named.groups() if named else (text, text)
        if name in found:
            raise ConfigError(f"trigger-set must have a name of its own, got {name!r} twice")
        found[name] = _unescaped([word for word in body.split(" ") if word])
    return found


def _option(name: str) -> str:
    return OPTIONS.get(name, name.replace("_", "-"))


def _unescaped(triggers: list[str]) -> list[str]:
    return [trigger.replace("\\n", "\n") for trigger in triggers]


def _values(name: str, text: str) -> list[Any]:
    # a list of ints, floats or names; each once, in their order
    found: list[Any] = []
    for word in words([text]):
        if name in TEXTS:
            found.append(word)
            continue
        try:
            found.append(float(word) if name in FLOATS else int(word))
        except ValueError as error:
            kind = "numbers" if name in FLOATS else "whole numbers"
            raise ConfigError(f"{_option(name)} must be {kind}, got {word!r}") from error
    if not found:
        raise ConfigError(f"{_option(name)} must have a value, got {text!r}")
    return list(dict.fromkeys(found))
