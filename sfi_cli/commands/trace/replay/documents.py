"""The documents of `sfi trace replay`, replayed settings and reused selections; and which are asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sfi_cli.parsing import named_strings, numbers, unescaped, words
from sfi_cli.settings.tables import SETTINGS
from sfi_cli.terminal.progress import BenchProgress
from sfi_core.errors import ConfigError

Note = Callable[[str], None]
Row = dict[str, Any]


def replay_settings(
    trace: Any, texts: Mapping[str, str], triggers: list[str] | None, trigger_sets: list[str] | None, note: Note
) -> list[Any]:
    """Combine values by setting, with commas between, as the user wrote them, into the settings to replay.

    `trigger_token_ids` among them belong to the set of `triggers`; `trigger_sets` are others, `NAME=A B C`
    each. `note` takes a line for the user.

    Raises `ConfigError` for an invalid value or an option without effect, `TraceError` for triggers of a redacted
    trace.
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


def replay_document(
    trace: Any,
    against: Path | None,
    part: Row,
    settings: Sequence[Any],
    *,
    batch: int,
    quiet: bool,
    own_budget: bool = False,
) -> Row:
    """Replay settings, or that of the run in the folder `against`, over a part of a trace.

    Given budgets beyond what the audit recorded are left out, `budgets_left_out`. The trace's, with `own_budget`, is
    cut, `budget_cut_from`. `part` has the request, layers and KV heads, `batch` is of the byte model. A replayed
    setting of a run of policy sfi that is its own is compared with what the run measured.
    """
    from sfi_traces.model.trace import Trace
    from sfi_traces.replay import SCAN, Setting, Supports, compare, pareto, replay, replayable

    real = trace if against is None else Trace.open(against)
    recorded = Supports.load(trace, **part)
    own = Setting.recorded(trace)
    beyond = _beyond(settings, recorded)
    if own_budget:
        settings = [replayable(one, recorded) for one in settings]
    else:  # with none left, a replay says what to record
        settings = [one for one in settings if one.config.budget not in beyond] or settings
    outcomes, interrupted = _each("settings", settings, lambda one: replay(recorded, one, batch=batch), quiet=quiet)
    found = list(zip(settings, outcomes, strict=False))
    found.sort(key=lambda pair: (-pair[1].speedup, -pair[1].retained_mass))
    front = pareto([outcome for _, outcome in found])
    rows = [
        {
            **setting.to_dict(),
            "trigger_token_ids": sorted(setting.trigger_token_ids),
            **asdict(outcome),
            "pareto": best,
            "recorded": setting.key == own.key,
        }
        for (setting, outcome), best in zip(found, front, strict=True)
    ]
    ran = trace.manifest["policy"] in ("sfi", SCAN) and any(row["recorded"] for row in rows)
    validation = None
    if against is not None or ran:
        validation = asdict(compare(recorded, trace, real, batch=batch))
    return {
        **_described(trace, recorded),
        "batch": batch,
        "rows": rows,
        "budgets_left_out": [] if own_budget else beyond,
        "budget_cut_from": beyond[0] if own_budget and beyond else None,
        "against": None if against is None else str(against),
        "against_top": None if against is None else real.manifest["audit"]["top"],
        "validation": validation,
        "interrupted": interrupted,
    }


def _beyond(settings: Sequence[Any], recorded: Sequence[Any]) -> list[int]:
    # the budgets that the audit's supports are too small for
    from sfi_traces.replay import largest_budget

    most = largest_budget(recorded)
    return sorted({one.config.budget for one in settings if most is not None and one.config.budget > most})


def reuse_document(trace: Any, part: Row, every: Sequence[int], settings: Sequence[Any], *, quiet: bool) -> Row:
    """Reuse recorded selections for `every` so many steps, then by the schedules of settings."""
    from sfi_traces.replay import RULES, Setting, Supports, chance, reuse, schedule

    config = Setting.recorded(trace).config.replace(trigger_policy="stride", slow_start=1)
    schedules: list[tuple[int | None, Any]] = [
        (count, Setting(config=config.replace(stride=count), trigger_token_ids=frozenset())) for count in every
    ]
    schedules += [(None, setting) for setting in settings]
    recorded = Supports.load(trace, **part)

    def row(pair: tuple[int | None, Any]) -> Row:
        count, setting = pair
        found = reuse(recorded, [schedule(one, setting) for one in recorded])
        values = setting.to_dict()
        when = {name: values[name] for name in ("policy", *RULES[setting.policy])}
        return {"every": count, **when, **asdict(found)}

    rows, interrupted = _each("schedules", schedules, row, quiet=quiet)
    return {
        **_described(trace, recorded),
        "masses": trace.masses,
        "chance": chance(recorded),
        "rows": rows,
        "interrupted": interrupted,
    }


def _described(trace: Any, recorded: Sequence[Any]) -> Row:
    return {
        "trace": str(trace.path),
        "model": trace.manifest["model"]["name"],
        "policy": trace.manifest["policy"],
        "audit_top": recorded[0].top,
        "requests": [
            {"request": one.request, "prompt_tokens": one.prompt_tokens, "steps": one.steps} for one in recorded
        ],
        "layers": recorded[0].layers,
        "heads": len(recorded[0].layer_U),
    }


def _each(what: str, settings: Sequence[Any], measure: Callable[[Any], Any], *, quiet: bool) -> tuple[list[Any], bool]:
    # what is measured of each setting, and whether Ctrl-C left settings out
    found: list[Any] = []
    try:
        with BenchProgress(quiet=quiet) as progress:
            for one in settings:
                progress.update(f"replaying {what}", len(found), len(settings))
                found.append(measure(one))
    except KeyboardInterrupt:
        return found, True
    return found, False
