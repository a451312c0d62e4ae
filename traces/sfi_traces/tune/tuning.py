"""A tuning: traces, the search space, objectives and limits."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sfi_traces.model.trace import Trace
from sfi_traces.replay import Setting, Supports
from sfi_traces.replay.measured import check_one_model
from sfi_traces.replay.replay import replayable
from sfi_traces.tune.objective import Evaluator, Limits, Objective
from sfi_traces.tune.space import Space
from sfi_traces.tune.study import Purpose, Search
from sfi_traces.tune.trigger_sets import distinct, given_sets, punctuation_sets, recorded_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is searched, on which traces."""

    traces: Sequence[Trace]
    recorded: Sequence[Sequence[Supports]]
    space: Space
    objectives: Mapping[str, Objective]
    limits: Limits
    evaluate: Evaluator

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        *,
        axes: Mapping[str, str | None],
        trigger_sets: Mapping[str, Sequence[str]],
        objectives: Mapping[str, Objective],
        limits: Limits,
        batch: int = 1,
    ) -> Self:
        """Read traces, and lay out the search space.

        The traces, at least one, are audited at every step and of one model; the first gives what is not
        searched. `axes` has values or ranges by setting, `trigger_sets` trigger strings by name in place of
        the default sets; `batch` requests share the weights in the byte model.

        Raises `TraceError` for a trace without an audit or tokens, of another model, or a budget beyond the audit's;
        `ConfigError` for a setting out of range, or if there is nothing to choose.
        """
        for trace in traces[1:]:
            check_one_model(traces[0], trace)
        recorded = [Supports.load(trace) for trace in traces]
        requests = [one for each in recorded for one in each]
        base = replayable(Setting.recorded(traces[0]), requests)
        own = recorded_set(base)
        sets = given_sets(traces, trigger_sets) if trigger_sets else [own, *punctuation_sets(traces)]
        generated = {token for one in requests for token in one.tokens}
        space = Space.of(base, requests, distinct(sets, generated), axes)
        evaluate = Evaluator(recorded=requests, batch=batch)
        return cls(
            traces=traces, recorded=recorded, space=space, objectives=objectives, limits=limits,
            evaluate=evaluate,
        )  # fmt: skip

    @property
    def purpose(self) -> Purpose:
        """The purpose of the tuning's study."""
        manifests = sorted(json.dumps(trace.manifest, sort_keys=True) for trace in self.traces)
        limits = [self.limits.min_retained, self.limits.max_read]
        return Purpose(
            traces=hashlib.sha256("".join(manifests).encode()).hexdigest()[:16],
            space=f"{self.space.fingerprint()}-{self.evaluate.batch}",
            objectives="-".join([*self.objectives, *map(str, limits)]),
        )

    def open(self, path: Path, *, seed: int = 0, resume: bool = False) -> Search:
        """Make the tuning's study, or go on with it; see `Search.open`."""
        directions = [one.direction for one in self.objectives.values()]
        return Search.open(path, self.purpose, directions, seed=seed, resume=resume)
