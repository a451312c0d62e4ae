"""A tuning: traces, search space and limits; and what to choose of a front."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import numpy as np

from sfi_core.errors import ConfigError, SfiError
from sfi_traces.model.trace import Trace
from sfi_traces.replay import Outcome, Setting, Supports, replay
from sfi_traces.replay.measured import check_one_model
from sfi_traces.replay.replay import replayable
from sfi_traces.tune.space import Space, trigger_sets_of

RULES = {
    "min-retained": "the cheapest that keeps the limits",
    "max-read": "the one that keeps most within the limit",
    "knee": "the knee: the closest to the fewest bytes and the most mass, each scaled to the front's range",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The least mean retained mass, and the largest share of the cached tokens read; None for no limit."""

    min_retained: float | None = None
    max_read: float | None = None

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a limit outside (0, 1]."""
        for name in ("min_retained", "max_read"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ConfigError(f"{name.replace('_', '-')} must be in (0, 1], got {value}")

    def violations(self, outcome: Outcome) -> dict[str, float]:
        """Return by how much each limit is exceeded; at most 0 where it is kept."""
        excess = {}
        if self.min_retained is not None:
            excess["min-retained"] = self.min_retained - outcome.retained_mass
        if self.max_read is not None:
            excess["max-read"] = outcome.read_ratio - self.max_read
        return excess

    def kept_by(self, outcome: Outcome) -> bool:
        """Say whether an outcome keeps all limits."""
        return all(value <= 0 for value in self.violations(outcome).values())


def costs(outcome: Outcome) -> tuple[float, float]:
    """Return what a tuning makes small: the bytes of a token, and the retained mass with its sign turned."""
    return outcome.bytes_per_token, -outcome.retained_mass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is searched, on which traces; `recorded` has the supports of each, `known` the outcomes by setting."""

    traces: Sequence[Trace]
    recorded: Sequence[Sequence[Supports]]
    space: Space
    limits: Limits
    known: dict[tuple[Any, ...], Outcome] = field(default_factory=dict)

    @classmethod
    def of(
        cls, traces: Sequence[Trace], axes: Mapping[str, str], trigger_sets: Mapping[str, Sequence[str]], limits: Limits
    ) -> Self:
        """Read traces, and lay out the search space; the first trace gives what is not searched.

        `axes` has values or ranges by setting, `trigger_sets` trigger strings by name in place of the default sets.
        Raises `TraceError` for a trace without an audit or tokens, of another model, or a budget beyond the audit's;
        `ConfigError` for a setting out of range, or if there is nothing to choose.
        """
        for trace in traces[1:]:
            check_one_model(traces[0], trace)
        recorded = [Supports.load(trace) for trace in traces]
        requests = list(chain.from_iterable(recorded))
        base = replayable(Setting.recorded(traces[0]), requests)
        generated = {token for request in requests for token in request.tokens}
        space = Space.of(base, requests, trigger_sets_of(base, traces, trigger_sets, generated), axes)
        return cls(traces=traces, recorded=recorded, space=space, limits=limits)

    @property
    def requests(self) -> list[Supports]:
        """The supports of every request."""
        return list(chain.from_iterable(self.recorded))

    def outcome(self, setting: Setting) -> Outcome:
        """Replay a setting over every request, once; raises `TraceError` for a budget beyond the audit's."""
        key = setting.key
        if key not in self.known:
            self.known[key] = replay(self.requests, setting)
        return self.known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting of the front with its replayed outcome."""

    setting: Setting
    outcome: Outcome


def none_keeps(limits: Limits, outcomes: Sequence[Outcome]) -> SfiError:
    """Return the error of a search without a front: says how close the best trial comes to the limits."""
    closest = min(outcomes, key=lambda outcome: sum(max(0.0, value) for value in limits.violations(outcome).values()))
    words = {"min_retained": "keep at least", "max_read": "read at most"}
    rule = " and ".join(f"{text} {getattr(limits, name):g}" for name, text in words.items() if getattr(limits, name))
    got = f"keeps {closest.retained_mass:.4g} and reads {closest.read_ratio:.4g}"
    return SfiError(f"a trial must {rule}, got none in {len(outcomes)}: the closest {got}")


def choose(front: Sequence[Candidate], limits: Limits) -> tuple[int, str]:
    """Choose a setting of a front that keeps the limits; return its place and the rule."""
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
