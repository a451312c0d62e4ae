"""The Pareto front of a study, which of its settings to choose, and a setting's real run beside its prediction."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sfi_core.errors import SfiError
from sfi_traces.replay import Comparison, Outcome, Setting
from sfi_traces.tune.space import Space
from sfi_traces.tune.study import Search
from sfi_traces.tune.tuning import Evaluator, Limits, costs

RULES = {
    "min-retained": "the cheapest that keeps the limits",
    "max-read": "the one that keeps most within the limit",
    "knee": "the knee: the closest to the fewest bytes and the most mass, each scaled to the front's range",
}
MEASURED = ("kl_next_token", "argmax_agreement", "decode_tokens_per_second", "exact_match")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting of the front with its replayed outcome."""

    setting: Setting
    outcome: Outcome


def front_of(search: Search, space: Space, evaluate: Evaluator) -> list[Candidate]:
    """Return the feasible settings that no other trial beats, cheapest first, each once."""
    from optuna.trial import FixedTrial  # noqa: PLC0415 - an extra

    candidates = {}
    for trial in search.best():
        setting = space.setting(FixedTrial(trial.params))
        candidates[setting.key] = Candidate(setting=setting, outcome=evaluate(setting))
    return sorted(candidates.values(), key=lambda candidate: costs(candidate.outcome))


def no_feasible(search: Search, space: Space, evaluate: Evaluator, limits: Limits) -> SfiError:
    """Return an error that says how close the best trial comes to the limits."""
    from optuna.trial import FixedTrial  # noqa: PLC0415 - an extra

    trials = search.complete()
    if not trials:
        return SfiError("no trial was made")
    closest = min(trials, key=lambda t: sum(max(0.0, v) for v in t.constraints.values()))
    outcome = evaluate(space.setting(FixedTrial(closest.params)))
    wanted, got = [], []
    if limits.min_retained is not None:
        wanted.append(f"keep at least {limits.min_retained:g}")
        got.append(f"keeps {outcome.retained_mass:.4g}")
    if limits.max_read is not None:
        wanted.append(f"read at most {limits.max_read:g}")
        got.append(f"reads {outcome.read_ratio:.4g}")
    return SfiError(f"a trial must {' and '.join(wanted)}, got none in {len(trials)}: the closest {' and '.join(got)}")


def choose(front: Sequence[Candidate], limits: Limits) -> tuple[int, str]:
    """Choose a setting of the front; return its place and the rule.

    With a least retained mass it is the cheapest, since all settings of a feasible front retain enough. With
    only a limit of what is read it is the one that retains most; without limits the knee.
    """
    table = np.array([costs(candidate.outcome) for candidate in front])
    if limits.min_retained is not None:
        return int(table[:, 0].argmin()), RULES["min-retained"]
    if limits.max_read is not None:
        return int(table[:, 1].argmin()), RULES["max-read"]
    low, high = table.min(0), table.max(0)
    scaled = (table - low) / np.where(high > low, high - low, 1)
    return int((scaled**2).sum(1).argmin()), RULES["knee"]


def even_places(count: int, wanted: int, included: int) -> list[int]:
    """Return `wanted` of `count` places, evenly apart and with `included` among them."""
    if wanted >= count:
        return list(range(count))
    if wanted <= 1:
        return [included] if wanted else []
    places = np.linspace(0, count - 1, wanted).round().astype(int)
    places[np.abs(places - included).argmin()] = included
    return sorted(set(places.tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A setting's prediction beside its run.

    Attributes:
        comparison: Over the steps whose earlier tokens are the trace's.
        kl_next_token: Mean KL from dense attention's next-token distribution at fast steps, nats.
        argmax_agreement: Share of fast steps with dense attention's most probable token.
        decode_tokens_per_second: Speed without the audit.
        exact_match: Whether the answer is right, word for word; None if the right one is unknown.
    """

    comparison: Comparison
    kl_next_token: float | None
    argmax_agreement: float | None
    decode_tokens_per_second: float
    exact_match: bool | None

    @property
    def error(self) -> float:
        """Predicted retained mass (lower bound) less the measured one."""
        return self.comparison.predicted.retained_mass - self.comparison.measured.retained_mass

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        compared = self.comparison
        return {
            "predicted": asdict(compared.predicted),
            "measured": asdict(compared.measured),
            "steps": sum(request.steps for request in compared.requests),
            "recorded_steps": sum(request.recorded_steps for request in compared.requests),
            "same_schedule": compared.same_schedule,
            "error": self.error,
            **{name: getattr(self, name) for name in MEASURED},
        }
