"""The Pareto front of a study, and which of its settings to choose."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sfi_core.errors import SfiError
from sfi_traces.replay import Outcome, Setting
from sfi_traces.tune.objective import Evaluator, Limits, Objective, costs
from sfi_traces.tune.space import Space
from sfi_traces.tune.study import Search

RULES = {
    "min-retained": "the cheapest that keeps the limits",
    "max-read": "the one that keeps most within the limit",
    "knee": "the knee: the closest to the best of every objective, each scaled to the front's range",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting of the front with its replayed outcome."""

    setting: Setting
    outcome: Outcome


def front_of(search: Search, space: Space, evaluate: Evaluator, chosen: Mapping[str, Objective]) -> list[Candidate]:
    """Return the feasible settings that no other trial beats, cheapest first, each once."""
    from optuna.trial import FixedTrial  # noqa: PLC0415 - an extra

    found = {}
    for trial in search.best():
        setting = space.setting(FixedTrial(trial.params))
        found[setting.key] = Candidate(setting=setting, outcome=evaluate(setting))
    return sorted(found.values(), key=lambda one: costs(one.outcome, chosen))


def no_feasible(search: Search, space: Space, evaluate: Evaluator, limits: Limits) -> SfiError:
    """Return an error that says how close the best trial comes to the limits."""
    from optuna.trial import FixedTrial  # noqa: PLC0415 - an extra

    trials = search.complete()
    if not trials:
        return SfiError(f"no trial was finished; go on with --study {search.path} --resume")
    closest = min(trials, key=lambda t: sum(max(0.0, v) for v in t.constraints.values()))
    outcome = evaluate(space.setting(FixedTrial(closest.params)))
    wanted, got = [], []
    if limits.min_retained is not None:
        wanted.append(f"keep at least {limits.min_retained:g}")
        got.append(f"keeps {outcome.retained_mass:.4g}")
    if limits.max_read is not None:
        wanted.append(f"read at most {limits.max_read:g}")
        got.append(f"reads {outcome.read_ratio:.4g}")
    return SfiError(
        f"a trial must {' and '.join(wanted)}, got none in {len(trials)}: the closest "
        f"{' and '.join(got)}; the study is kept in {search.path}"
    )


def choose(front: Sequence[Candidate], chosen: Mapping[str, Objective], limits: Limits) -> tuple[int, str]:
    """Choose a setting of the front; return its place and the rule.

    With a least retained mass it is the cheapest, since all settings of a feasible front retain enough. With
    only a limit of what is read it is the one that retains most; without limits the knee.
    """
    table = np.array([costs(one.outcome, chosen) for one in front])
    directions = [one.direction for one in chosen.values()]
    if limits.min_retained is not None:
        return int(table[:, directions.index("minimize")].argmin()), RULES["min-retained"]
    if limits.max_read is not None:
        return int(table[:, directions.index("maximize")].argmin()), RULES["max-read"]
    low, high = table.min(0), table.max(0)
    scaled = (table - low) / np.where(high > low, high - low, 1)
    return int((scaled**2).sum(1).argmin()), RULES["knee"]


def spread(count: int, wanted: int, included: int) -> list[int]:
    """Return `wanted` of `count` places, evenly spread and with `included` among them."""
    if wanted >= count:
        return list(range(count))
    if wanted <= 1:
        return [included] if wanted else []
    places = np.linspace(0, count - 1, wanted).round().astype(int)
    places[np.abs(places - included).argmin()] = included
    return sorted(set(places.tolist()))
