"""A tuning: traces, the search space and limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Self

from sfi_core.errors import ConfigError
from sfi_traces.model.trace import Trace
from sfi_traces.replay import Outcome, Setting, Supports, replay
from sfi_traces.replay.measured import check_one_model
from sfi_traces.replay.replay import replayable
from sfi_traces.tune.space import Space, distinct, given_sets, punctuation_sets, recorded_set


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


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Replays each setting once over every request."""

    recorded: Sequence[Supports]
    _known: dict[tuple[object, ...], Outcome] = field(default_factory=dict)

    def __call__(self, setting: Setting) -> Outcome:
        """Return a setting's outcome; raises `TraceError` for a budget beyond what an audit recorded."""
        key = setting.key
        if key not in self._known:
            self._known[key] = replay(self.recorded, setting)
        return self._known[key]


def costs(outcome: Outcome) -> tuple[float, float]:
    """Return what a tuning makes small: the bytes of a token, and the retained mass with its sign turned."""
    return outcome.bytes_per_token, -outcome.retained_mass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is searched, on which traces."""

    traces: Sequence[Trace]
    recorded: Sequence[Sequence[Supports]]
    space: Space
    limits: Limits
    evaluate: Evaluator

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        *,
        axes: Mapping[str, str | None],
        trigger_sets: Mapping[str, Sequence[str]],
        limits: Limits,
    ) -> Self:
        """Read traces, and lay out the search space.

        The traces, at least one, are audited at every step and of one model; the first gives what is not
        searched. `axes` has values or ranges by setting, `trigger_sets` trigger strings by name in place of
        the default sets.

        Raises `TraceError` for a trace without an audit or tokens, of another model, or a budget beyond the audit's;
        `ConfigError` for a setting out of range, or if there is nothing to choose.
        """
        for trace in traces[1:]:
            check_one_model(traces[0], trace)
        recorded = [Supports.load(trace) for trace in traces]
        requests = list(chain.from_iterable(recorded))
        base = replayable(Setting.recorded(traces[0]), requests)
        sets = given_sets(traces, trigger_sets) if trigger_sets else [recorded_set(base), *punctuation_sets(traces)]
        generated = {token for request in requests for token in request.tokens}
        space = Space.of(base, requests, distinct(sets, generated), axes)
        evaluate = Evaluator(recorded=requests)
        return cls(traces=traces, recorded=recorded, space=space, limits=limits, evaluate=evaluate)
