"""The documents of `sfi trace replay`, replayed settings and reused selections; and which are asked for."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from sfi_cli.parsing import named_strings, numbers, unescaped
from sfi_cli.settings import SETTINGS
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError
from sfi_traces.model.supports import Supports
from sfi_traces.model.trace import Row, Trace
from sfi_traces.replay.measured import compare
from sfi_traces.replay.outcome import pareto
from sfi_traces.replay.replay import largest_budget, replay, replayable, schedule
from sfi_traces.replay.reuse import chance, reuse
from sfi_traces.replay.setting import RULES, SCAN, RecordedVocabulary, Setting, check_effect, grid

T = TypeVar("T")


def replay_settings(
    trace: Trace,
    texts: Mapping[str, str],
    triggers: list[str] | None,
    trigger_sets: list[str] | None,
    note: Callable[[str], None],
) -> list[Setting]:
    """Combine values by setting, as the user wrote them, into the settings to replay; `note` takes a line for the user.

    `trigger_token_ids` among them belong to the set of `triggers`; `trigger_sets` are others, `NAME=A B C` each. Raise
    `ConfigError` for an invalid value or an option without effect, `TraceError` for triggers of a redacted trace.
    """
    base = Setting.recorded(trace)
    axes = {name: _values(name, text) for name, text in texts.items()}
    policies = axes.pop("trigger_policy", [base.policy])
    ids, named = axes.pop("trigger_token_ids", []), named_strings(trigger_sets)
    sets: dict[str, frozenset[int]] = {}
    if named or triggers or ids:
        vocabulary = RecordedVocabulary.of([trace])
        if triggers or ids:
            name = " ".join([*(triggers or []), *map(str, ids)])
            sets[name] = frozenset(ids) | vocabulary.trigger_ids(unescaped(triggers or []))
        sets |= {name: vocabulary.trigger_ids(body) for name, body in named.items()}
    for name, token_ids in sets.items():
        if not token_ids:
            note(f"note: no generated token matches the triggers {name!r}")
    check_effect({*axes, *(["triggers"] if sets else [])}, policies)
    return grid(base, policies, sets, axes)


def intervals(text: str | None, default: Sequence[int]) -> Sequence[int]:
    """Read the values of `--refresh-every`, each once; raises `ConfigError` for one below 1."""
    if text is None:
        return default
    steps = numbers([text], int, "refresh-every must be whole numbers")
    if min(steps) < 1:
        raise ConfigError(f"refresh-every must be at least 1, got {text!r}")
    return list(dict.fromkeys(steps))


def _values(name: str, text: str) -> list[Any]:
    # ints, floats or names, each once
    kind = SETTINGS[name].kind
    what = {int: "whole numbers", float: "numbers"}.get(kind, "a list of names")
    return list(dict.fromkeys(numbers([text], kind, f"{name} must be {what}")))


def replay_document(
    trace: Trace, against: Path | None, part: Row, settings: Sequence[Setting], *, own_budget: bool, quiet: bool
) -> Row:
    """Replay settings, or that of the run in the folder `against`, over a part of a trace: request, layers, KV heads.

    Given budgets beyond what the audit recorded are left out; the trace's, with `own_budget`, is cut.
    """
    real = trace if against is None else Trace.open(against)
    recorded = Supports.load(trace, **part)
    most = largest_budget(recorded)
    beyond = sorted({setting.config.budget for setting in settings if most and setting.config.budget > most})
    if own_budget:
        settings = [replayable(setting, recorded) for setting in settings]
    else:  # with none left, a replay says what to record
        settings = [setting for setting in settings if setting.config.budget not in beyond] or settings
    replayed = [(setting, replay(recorded, setting)) for setting in _each("settings", settings, quiet=quiet)]
    replayed.sort(key=lambda pair: (-pair[1].speedup, -pair[1].retained_mass))
    front, key = pareto([outcome for _, outcome in replayed]), Setting.recorded(trace).key
    rows = [
        {
            **setting.to_dict(),
            "trigger_token_ids": sorted(setting.trigger_token_ids),
            **asdict(outcome),
            "pareto": best,
            "recorded": setting.key == key,
        }
        for (setting, outcome), best in zip(replayed, front, strict=True)
    ]
    ran = trace.manifest["policy"] in ("sfi", SCAN) and any(row["recorded"] for row in rows)
    return {
        **_described(trace, recorded),
        "rows": rows,
        "budgets_left_out": [] if own_budget else beyond,
        "budget_cut_from": beyond[0] if own_budget and beyond else None,
        "against": None if against is None else str(against),
        "against_top": None if against is None else real.manifest["audit"]["top"],
        "validation": asdict(compare(recorded, trace, real)) if ran or against is not None else None,
    }


def reuse_document(trace: Trace, part: Row, every: Sequence[int], settings: Sequence[Setting], *, quiet: bool) -> Row:
    """Reuse recorded selections for `every` so many steps, then by the schedules of settings."""
    config = Setting.recorded(trace).config.replace(trigger_policy="stride", slow_start=1)
    schedules: list[tuple[int | None, Setting]] = [
        (count, Setting(config=config.replace(stride=count), trigger_token_ids=frozenset())) for count in every
    ]
    schedules += [(None, setting) for setting in settings]
    recorded, rows = Supports.load(trace, **part), []
    for count, setting in _each("schedules", schedules, quiet=quiet):
        values = setting.to_dict()
        when = {name: values[name] for name in ("policy", *RULES[setting.policy])}
        reused = reuse(recorded, [schedule(supports, setting) for supports in recorded])
        rows.append({"every": count, **when, **reused})
    return {**_described(trace, recorded), "masses": trace.masses, "chance": chance(recorded), "rows": rows}


def _described(trace: Trace, recorded: Sequence[Supports]) -> Row:
    return {
        "trace": str(trace.path),
        "model": trace.manifest["model"]["name"],
        "policy": trace.manifest["policy"],
        "audit_top": recorded[0].top,
        "requests": [
            {name: getattr(supports, name) for name in ("request", "prompt_tokens", "steps")} for supports in recorded
        ],
        "layers": recorded[0].layers,
        "heads": len(recorded[0].layer_U),
    }


def _each(what: str, settings: Sequence[T], *, quiet: bool) -> Iterator[T]:
    # with the progress
    with Progress(quiet=quiet) as progress:
        for number, setting in enumerate(settings):
            progress.update(f"replaying {what}", number, len(settings))
            yield setting
