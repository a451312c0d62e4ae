"""The documents of `sfi trace replay`: replayed settings, and reused selections."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sfi_cli.terminal.progress import BenchProgress

Row = dict[str, Any]


def replay_document(
    trace: Any, against: Path | None, part: Row, settings: Sequence[Any], *, batch: int, quiet: bool
) -> Row:
    """Replay settings, or that of the run in the folder `against`, over a part of a trace.

    `part` has the request, layers and KV heads, `batch` is of the byte model. A replayed setting of a run of
    policy sfi that is its own is compared with what the run measured.
    """
    from sfi_traces.model.trace import Trace
    from sfi_traces.replay import Setting, Supports, compare, pareto, replay

    real = trace if against is None else Trace.open(against)
    recorded = Supports.load(trace, **part)
    own = Setting.recorded(trace)
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
    ran = trace.manifest["policy"] == "sfi" and any(row["recorded"] for row in rows)
    validation = None
    if against is not None or ran:
        validation = asdict(compare(recorded, trace, real, batch=batch))
    return {
        **_described(trace, recorded),
        "batch": batch,
        "rows": rows,
        "against": None if against is None else str(against),
        "validation": validation,
        "interrupted": interrupted,
    }


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
