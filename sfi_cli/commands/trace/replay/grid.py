"""The settings and schedules to replay, from the options of `sfi trace replay`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sfi_cli.parsing import named_strings, numbers, unescaped, words
from sfi_cli.settings.tables import SETTINGS
from sfi_core.errors import ConfigError

Note = Callable[[str], None]


def replay_settings(
    trace: Any, texts: Mapping[str, str], triggers: list[str] | None, trigger_sets: list[str] | None, note: Note
) -> list[Any]:
    """Combine values by setting, with commas between, as the user wrote them, into the settings to replay.

    `trigger_token_ids` among them belong to the set of `triggers`; `trigger_sets` are others, `NAME=A B C`
    each. `note` takes a line for the user.

    Raises:
        ConfigError: A value is invalid, or an option has no effect.
        TraceError: Trigger strings for a redacted trace.
    """
    from sfi_traces.replay import Setting, check_effect, grid

    base = Setting.recorded(trace)
    axes = {name: _values(name, text) for name, text in texts.items()}
    policies = axes.pop("trigger_policy", [base.policy])
    ids = axes.pop("trigger_token_ids", [])
    sets = _sets(trace, triggers or [], ids, named_strings(trigger_sets), note)
    check_effect({*axes, *(["triggers"] if sets else [])}, policies)
    return grid(base, policies, sets, axes)


def intervals(text: str | None, default: Sequence[int]) -> Sequence[int]:
    """Read the values of `--refresh-every`, each once; raises `ConfigError` for one below 1."""
    if text is None:
        return default
    found = numbers([text], int, "refresh-every must be whole numbers")
    if not found or min(found) < 1:
        raise ConfigError(f"refresh-every must be at least 1, got {text!r}")
    return list(dict.fromkeys(found))


def _sets(
    trace: Any, triggers: list[str], ids: list[int], named: dict[str, list[str]], note: Note
) -> dict[str, frozenset[int]]:
    if not (named or triggers or ids):
        return {}
    from sfi_traces.replay import RecordedVocabulary

    vocabulary = RecordedVocabulary.of([trace])
    sets = {}
    if triggers or ids:
        name = " ".join([*triggers, *map(str, ids)])
        sets[name] = frozenset(ids) | vocabulary.trigger_ids(unescaped(triggers))
    sets |= {name: vocabulary.trigger_ids(body) for name, body in named.items()}
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
