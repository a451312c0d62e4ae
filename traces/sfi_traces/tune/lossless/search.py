"""The search: every combination of trigger sets, delays, gaps and draft lengths; tokens a byte decide.

`t_max` and `draft.max_tokens` both end a draft, so that the smaller one counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

from sfi_core.errors import ConfigError
from sfi_core.policies import Policy, Triggered, policy_class
from sfi_core.settings.config import SfiConfig
from sfi_traces.read.reader import Trace
from sfi_traces.replay import Setting
from sfi_traces.tune.lossless.acceptance import Acceptance
from sfi_traces.tune.lossless.cycles import Schedule, expected
from sfi_traces.tune.lossless.outcome import Costs, Outcome, recorded_outcome
from sfi_traces.tune.lossless.space import (
    MAX_TOKENS,
    check_alike,
    proposed_sets,
    searched_values,
)
from sfi_traces.tune.lossless.texts import Text, load_texts
from sfi_traces.tune.trigger_sets import NamedSet, distinct
from sfi_traces.tune.tuned import tuned_config

LEAST_KNOWN = 0.9  # share of the tested tokens whose acceptance must have been measured
SAME = 0.005  # settings whose bytes and verifications differ by a smaller share do the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting, and what is predicted of it.

    Attributes:
        chosen: The trigger set; None verifies by the draft's length alone (`draft.rule` fixed).
        schedule: When it verifies.
        outcome: The prediction.
    """

    chosen: NamedSet | None
    schedule: Schedule
    outcome: Outcome

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; None for what a fixed rule does not look at."""
        schedule, named = self.schedule, self.chosen
        return {
            "triggers": named and named.name,
            "trigger_delay": schedule.trigger_delay if named else None,
            "min_gap": schedule.min_gap if named else None,
            "t_max": schedule.t_max if named else None,
            "max_tokens": schedule.max_tokens,
            "predicted": self.outcome.to_dict(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessTuning:
    """What is searched, and on what.

    Attributes:
        traces: Lossless traces of one model, policy and memory.
        texts: Their requests.
        sets: The trigger sets.
        axes: The values of `trigger_delay`, `min_gap` and `t_max`.
        base: The first trace's settings.
        costs: What a pass reads.
        recorded: What the traces' own runs did.
    """

    traces: Sequence[Trace]
    texts: Sequence[Text]
    sets: Sequence[NamedSet]
    axes: Mapping[str, tuple[int, ...]]
    base: SfiConfig
    costs: Costs
    recorded: Outcome

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        *,
        axes: Mapping[str, str | None],
        trigger_sets: Mapping[str, Sequence[str]],
        batch: int = 1,
    ) -> Self:
        """Read traces and lay the search out.

        Args:
            traces: At least one; the first gives what is not searched.
            axes: Values by setting, as `Axis.parse` reads them; None takes the default.
            trigger_sets: Trigger strings by name, in place of the default sets.
            batch: Requests that share the weights, in the byte model.

        Raises:
            TraceError: A plain run, or traces that do not go together.
            ConfigError: A setting that is not searched, or out of range, or boundaries of a policy without.
        """
        policy = traces[0].manifest["policy"]
        if (axes or trigger_sets) and not issubclass(policy_class(policy), Triggered):
            raise ConfigError(
                f"policy must have boundaries with trigger sets or a search of them, got {policy}"
            )
        texts = [text for trace in traces for text in load_texts(trace)]
        setting = Setting.recorded(traces[0])
        for trace in traces[1:]:
            check_alike(traces[0], trace)
        sets = proposed_sets(traces, setting, trigger_sets)
        costs = Costs.of(traces, setting.config, batch)
        return cls(
            traces=traces,
            texts=texts,
            sets=distinct(sets, {token for text in texts for token in text.tokens}),
            axes=searched_values(setting.config, axes),
            base=setting.config,
            costs=costs,
            recorded=Outcome.sum([recorded_outcome(trace, costs) for trace in traces]),
        )

    @property
    def repeats(self) -> bool:
        """Whether a slow step of its own follows a rejection; see `Drafts`."""
        return self.base.draft.evidence == "last" and self._kind.refreshes()

    @property
    def _kind(self) -> type[Policy]:
        return policy_class(self.traces[0].manifest["policy"])

    def search(self, on_part: Callable[[int, int], None] = lambda *_: None) -> list[Candidate]:
        """Predict every combination, each behavior once, best first.

        Args:
            on_part: Told how many trigger sets are behind us, and of how many.

        Returns:
            The candidates whose acceptance is known to `LEAST_KNOWN`, and then the others.
        """
        found: list[Candidate] = []
        sets = (*self.sets, None) if issubclass(self._kind, Triggered) else (None,)
        for done, named in enumerate(sets):
            on_part(done, len(sets))
            found += self.predict(named, self._schedules(named))
        found.sort(key=lambda one: (one.outcome.known < LEAST_KNOWN, -one.outcome.speed))
        kept: list[Candidate] = []
        for one in found:
            if not kept or not _alike(one.outcome, kept[-1].outcome):
                kept.append(one)
        return kept

    def predict(self, named: NamedSet | None, schedules: Sequence[Schedule]) -> list[Candidate]:
        """Predict some schedules of one trigger set; None is the fixed rule."""
        # where no boundary verifies, the traces' own sentences still tell where drafts fail
        sentences = (named or self.sets[0]).token_ids
        acceptance = Acceptance.of(self.texts, sentences)
        outcomes = expected(
            self.texts, schedules, acceptance, sentences, self.costs, repeats=self.repeats
        )
        pairs = zip(schedules, outcomes, strict=True)
        return [Candidate(chosen=named, schedule=one, outcome=each) for one, each in pairs]

    def config(self, candidate: Candidate) -> SfiConfig:
        """Return the settings that a candidate runs with."""
        schedule, fixed = candidate.schedule, candidate.chosen is None
        draft = {
            "max_tokens": schedule.max_tokens, "rule": "fixed" if fixed else "boundary",
            "confidence": 0.0, "adaptive": False,
        }  # fmt: skip
        if fixed:
            return self.base.replace(draft=draft)
        config = self.base.replace(
            trigger_policy="boundary", trigger_delay=schedule.trigger_delay,
            min_gap=schedule.min_gap, t_max=schedule.t_max, draft=draft,
        )  # fmt: skip
        return tuned_config(Setting(config=config, trigger_token_ids=frozenset()), candidate.chosen)

    def _schedules(self, named: NamedSet | None) -> list[Schedule]:
        first = Schedule(
            token_ids=None if named is None else named.token_ids,
            trigger_delay=0,
            min_gap=0,
            t_max=MAX_TOKENS,
            slow_start=self.base.slow_start if issubclass(self._kind, Triggered) else 0,
            max_tokens=1,
        )
        lengths = range(1, MAX_TOKENS + 1)
        if named is None:
            return [replace(first, max_tokens=length) for length in lengths]
        return [
            replace(first, trigger_delay=delay, min_gap=gap, t_max=t_max, max_tokens=length)
            for t_max, delay, gap in product(
                self.axes["t_max"], self.axes["trigger_delay"], self.axes["min_gap"]
            )
            for length in lengths
            if length <= max(1, t_max)
        ]


def _alike(one: Outcome, other: Outcome) -> bool:
    pairs = (one.bytes, other.bytes), (one.verifications, other.verifications)
    return all(abs(a / b - 1) <= SAME for a, b in pairs)
