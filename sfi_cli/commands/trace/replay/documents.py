"""The documents of `sfi trace replay`, replayed settings and reused selections; and which are asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sfi_cli.parsing import named_strings, numbers, unescaped, words
from sfi_cli.settings import SETTINGS
from sfi_cli.terminal.progress import Progress
from sfi_core.errors import ConfigError
from sfi_traces.model.trace import Row, Trace
from sfi_traces.replay import (
    RULES,
    SCAN,
    RecordedVocabulary,
    Setting,
    Supports,
    chance,
    check_effect,
    compare,
    grid,
    largest_budget,
    pareto,
    replay,
    replayable,
    reuse,
    schedule,
)

Note = Callable[[str], None]


def replay_settings(
    trace: Trace, texts: Mapping[str, str], triggers: list[str] | None, trigger_sets: list[str] | None, note: Note
) -> list[Setting]:
    """Combine values by setting, with commas between, as the user wrote them, into the settings to replay.

    `trigger_token_ids` among them belong to the set of `triggers`; `trigger_sets` are others, `NAME=A B C`
    each. `note` takes a line for the user.

    Raises `ConfigError` for an invalid value or an option without effect, `TraceError` for triggers of a redacted
    trace.
    """
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
    steps = numbers([text], int, "refresh-every must be whole numbers")
    if not steps or min(steps) < 1:
        raise ConfigError(f"refresh-every must be at least 1, got {text!r}")
    return list(dict.fromkeys(steps))


def _sets(
    trace: Trace, triggers: list[str], ids: list[int], named: dict[str, list[str]], note: Note
) -> dict[str, frozenset[int]]:
    if not (named or triggers or ids):
        return {}
    vocabulary = RecordedVocabulary.of([trace])
    sets = {}
    if triggers or ids:
        name = " ".join([*triggers, *map(str, ids)])
        sets[name] = frozenset(ids) | vocabulary.trigger_ids(unescaped(triggers))
    sets |= {name: vocabulary.trigger_ids(body) for name, body in named.items()}
    for name, token_ids in sets.items():
        if not token_ids:
            note(f"note: no generated token matches the triggers {name!r}")
    return sets


def _values(name: str, text: str) -> list[Any]:
    # ints, floats or names, each once
    kind = SETTINGS[name].kind
    rule = f"{name} must be {'numbers' if kind is float else 'whole numbers'}"
    values: list[Any] = words([text]) if kind is str else numbers([text], kind, rule)
    if not values:
        raise ConfigError(f"{name} must have a value, got {text!r}")
    return list(dict.fromkeys(values))


def replay_document(
    trace: Trace,
    against: Path | None,
    part: Row,
    settings: Sequence[Setting],
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
    real = trace if against is None else Trace.open(against)
    recorded = Supports.load(trace, **part)
    own = Setting.recorded(trace)
    beyond = _beyond(settings, recorded)
    if own_budget:
        settings = [replayable(setting, recorded) for setting in settings]
    else:  # with none left, a replay says what to record
        settings = [setting for setting in settings if setting.config.budget not in beyond] or settings
    outcomes, interrupted = _each(
        "settings", settings, lambda setting: replay(recorded, setting, batch=batch), quiet=quiet
    )
    replayed = list(zip(settings, outcomes, strict=False))
    replayed.sort(key=lambda pair: (-pair[1].speedup, -pair[1].retained_mass))
    front = pareto([outcome for _, outcome in replayed])
    rows = [
        {
            **setting.to_dict(),
            "trigger_token_ids": sorted(setting.trigger_token_ids),
            **asdict(outcome),
            "pareto": best,
            "recorded": setting.key == own.key,
        }
        for (setting, outcome), best in zip(replayed, front, strict=True)
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


def _beyond(settings: Sequence[Setting], recorded: Sequence[Supports]) -> list[int]:
    # the budgets that the audit's supports are too small for
    most = largest_budget(recorded)
    return sorted({setting.config.budget for setting in settings if most is not None and setting.config.budget > most})


def reuse_document(trace: Trace, part: Row, every: Sequence[int], settings: Sequence[Setting], *, quiet: bool) -> Row:
    """Reuse recorded selections for `every` so many steps, then by the schedules of settings."""
    config = Setting.recorded(trace).config.replace(trigger_policy="stride", slow_start=1)
    schedules: list[tuple[int | None, Setting]] = [
        (count, Setting(config=config.replace(stride=count), trigger_token_ids=frozenset())) for count in every
    ]
    schedules += [(None, setting) for setting in settings]
    recorded = Supports.load(trace, **part)

    def row(pair: tuple[int | None, Setting]) -> Row:
        count, setting = pair
        reused = reuse(recorded, [schedule(supports, setting) for supports in recorded])
        values = setting.to_dict()
        when = {name: values[name] for name in ("policy", *RULES[setting.policy])}
        return {"every": count, **when, **asdict(reused)}

    rows, interrupted = _each("schedules", schedules, row, quiet=quiet)
    return {
        **_described(trace, recorded),
        "masses": trace.masses,
        "chance": chance(recorded),
        "rows": rows,
        "interrupted": interrupted,
    }


def _described(trace: Trace, recorded: Sequence[Supports]) -> Row:
    return {
        "trace": str(trace.path),
        "model": trace.manifest["model"]["name"],
        "policy": trace.manifest["policy"],
        "audit_top": recorded[0].top,
        "requests": [
            {"request": supports.request, "prompt_tokens": supports.prompt_tokens, "steps": supports.steps}
            for supports in recorded
        ],
        "layers": recorded[0].layers,
        "heads": len(recorded[0].layer_U),
    }


def _each(what: str, settings: Sequence[Any], measure: Callable[[Any], Any], *, quiet: bool) -> tuple[list[Any], bool]:
    # what is measured of each setting, and whether Ctrl-C left settings out
    measured: list[Any] = []
    try:
        with Progress(quiet=quiet) as progress:
            for setting in settings:
                progress.update(f"replaying {what}", len(measured), len(settings))
                measured.append(measure(setting))
    except KeyboardInterrupt:
        return measured, True
    return measured, False
