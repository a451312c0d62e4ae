"""The time and memory of one run of one variant."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sfi_core.engine.ledger import steady_seconds
from sfi_core.engine.report import TierReport
from sfi_core.measure.bench.settings import LEAST_STEPS
from sfi_core.state.request import Tally

FAST, MIXED, SLOW = "fast", "mixed", "slow"
KINDS = (FAST, MIXED, SLOW)
DRAFTING = ("verifications", "accepted")


@dataclass(frozen=True, slots=True)
class StepRead:
    """What a decoding step read."""

    slow_B: tuple[bool, ...]  # whether each request was slow
    length_B: tuple[int, ...]  # cached tokens of each request
    read_B: tuple[float, ...]  # tokens that a fast step of each request reads for each KV head
    packed_B: tuple[int, ...]  # sink and selected tokens of each request

    @classmethod
    def dense(cls, contexts: Sequence[int], step: int) -> "StepRead":
        """Return what a step (from 1 on) reads under full attention."""
        length = tuple(context + step for context in contexts)
        return cls((True,) * len(length), length, length, (0,) * len(length))

    @property
    def kind(self) -> str:
        """Whether the step is fast for all requests, slow for all, or mixed."""
        return SLOW if all(self.slow_B) else MIXED if any(self.slow_B) else FAST


def drafting_of(tallies: Iterable[Tally]) -> Counter[str]:
    """Add up the counts of a lossless run's requests: dense passes after the prompt's, and tokens kept of drafts."""
    return sum((Counter({name: getattr(tally, name) for name in DRAFTING}) for tally in tallies), Counter())


@dataclass(slots=True)
class DecodeSample:
    """One run, and the times at which the tokens of its steps arrived."""

    batch: int
    warm_up: int  # decoding steps that are not measured
    # times when the tokens of step 0, 1, ... arrived; step 0 is the prompt's last token
    at: list[float] = field(default_factory=list)
    # tokens that each pass of a lossless run gave to all requests, the first token first; else empty
    gave: list[int] = field(default_factory=list)
    # `drafting_of` the measured passes of a lossless run; None for another run
    drafting: Mapping[str, int] | None = None
    reads: list[StepRead] = field(default_factory=list)  # what each step from step 1 on read
    # what the policy read to choose in the measured steps, in tokens per KV head, the mean over layers
    selecting: float = 0.0
    peak_bytes: int = 0
    forecast_bytes: int = 0
    stopped: bool = False  # whether the time limit ended the run
    tiers: TierReport | None = None  # where keys and values lay under a device budget; None without one
    # calls by path (`graph.replay`, ...), with warm-up and prompt; empty for transformers
    paths: dict[str, int] = field(default_factory=dict)
    # why steps were not replayed as graphs, and not compiled, although those are on; "" if all were
    not_replayed: str = ""
    not_compiled: str = ""

    @property
    def steps(self) -> int:
        """Decoding steps measured; in a lossless run, passes."""
        return max(0, len(self.at) - 1 - self.warm_up)

    @property
    def tokens(self) -> int:
        """Tokens that the measured steps gave to all requests."""
        return sum(self.gave[1 + self.warm_up :]) if self.gave else self.batch * self.steps

    @property
    def measured(self) -> list[StepRead]:
        """What the measured steps read."""
        return self.reads[self.warm_up : self.warm_up + self.steps]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each measured step."""
        at = self.at[self.warm_up :]
        return [after - before for before, after in pairwise(at)]

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the warm-up, if each step took the median of those with as many slow requests."""
        laps: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for read, seconds in zip(self.measured, self.step_seconds, strict=True):
            laps[(sum(read.slow_B),)].append(seconds)
        return self.tokens / steady_seconds(laps)

    @property
    def all_decode_rate(self) -> float:
        """Tokens per second after the first, including warm-up and graph capture."""
        tokens = sum(self.gave[1:]) if self.gave else self.batch * (len(self.at) - 1)
        return tokens / (self.at[-1] - self.at[0])

    @property
    def slow_rate(self) -> float:
        """Share of slow requests in the measured steps."""
        return statistics.fmean(slow for step in self.measured for slow in step.slow_B)

    def shorten_warm_up(self, limit: float | None) -> None:
        """End the warm-up with the last step if it has taken more than `limit` seconds."""
        warmed = len(self.at) - 1
        if limit is not None and 0 < warmed < self.warm_up and self.at[-1] - self.at[0] > limit:
            self.warm_up = warmed

    def over(self, limit: float | None) -> bool:
        """Say whether the run has measured `LEAST_STEPS`, for more than `limit` seconds."""
        if limit is None or self.steps < LEAST_STEPS:
            return False
        return self.at[-1] - self.at[self.warm_up] > limit
