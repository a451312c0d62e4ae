"""A row of the benchmark: what its runs decode, given tokens after a random cache, and what they took."""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from sfi_core.engine.ledger import steady_seconds
from sfi_core.engine.report import RunReport
from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.hosts.transformers.stores import engine_for
from sfi_core.measure.bench.settings import LEAST_STEPS, TRIGGER, DecodeSettings, Point
from sfi_core.policies import policy_class
from sfi_core.settings.engine import EngineOptions
from sfi_core.sizes.step import ByteModel

KINDS = FAST, MIXED, SLOW = "fast", "mixed", "slow"


@dataclass(frozen=True, slots=True)
class DecodeVariant:
    """One way to decode."""

    name: str
    policy: str = ""  # our policy; "" for a baseline
    engine: EngineOptions = field(default_factory=EngineOptions)
    acceptance: float | None = None  # in a lossless run, the stated chance that a tested token is kept


def variants(settings: DecodeSettings) -> list[DecodeVariant]:
    """Return the variants of a benchmark; a policy that cannot offload runs without the device budget."""
    lossless = replace(settings.engine, lossless=True, kv_device_budget=None)
    ways = []
    for policy in dict.fromkeys(settings.policies):
        ways.append(DecodeVariant(policy, policy, engine_for(policy, settings.engine)))
        if settings.lossless and policy_class(policy).drafts:
            ways.append(DecodeVariant(f"{policy}-lossless", policy, lossless, settings.acceptance))
    return ways + [DecodeVariant(name) for name in dict.fromkeys(settings.baselines)]


class Read(NamedTuple):
    """What a decoding step read for a request."""

    slow: bool
    length: int  # cached tokens
    fast_tokens: float  # tokens that a fast step reads for each KV head
    packed: int  # sink and selected tokens


def kind_of(reads: Sequence[Read]) -> str:
    """Say whether a step is fast for all requests, slow for all, or mixed."""
    slow = [read.slow for read in reads]
    return SLOW if all(slow) else MIXED if any(slow) else FAST


@dataclass(slots=True)
class DecodeSample:
    """One run, and the times at which the tokens of its steps arrived."""

    batch: int
    warm_up: int  # decoding steps that are not measured
    # times when the tokens of step 0, 1, ... arrived; step 0 is the prompt's last token
    at: list[float] = field(default_factory=list)
    # tokens that each pass of a lossless run gave to all requests, the first token first; else empty
    gave: list[int] = field(default_factory=list)
    # of the measured passes of a lossless run: `verifications`, and tokens `accepted` of drafts; None for another run
    drafting: Mapping[str, int] | None = None
    reads: list[list[Read]] = field(default_factory=list)  # by step from step 1 on, and by request
    # what the policy read to choose in the measured steps, in tokens per KV head, the mean over layers
    selecting: float = 0.0
    peak_bytes: int = 0
    forecast_bytes: int = 0
    stopped: bool = False  # whether the time limit ended the run
    report: RunReport | None = None  # with warm-up and prompt; None for transformers

    @property
    def steps(self) -> int:
        """Decoding steps measured; in a lossless run, passes."""
        return max(0, len(self.at) - 1 - self.warm_up)

    @property
    def tokens(self) -> int:
        """Tokens that the measured steps gave to all requests."""
        return sum(self.gave[1 + self.warm_up :]) if self.gave else self.batch * self.steps

    @property
    def measured(self) -> list[list[Read]]:
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
        for reads, seconds in zip(self.measured, self.step_seconds, strict=True):
            laps[(sum(read.slow for read in reads),)].append(seconds)
        return self.tokens / steady_seconds(laps)

    @property
    def all_decode_rate(self) -> float:
        """Tokens per second after the first, including warm-up and graph capture."""
        tokens = sum(self.gave[1:]) if self.gave else self.batch * (len(self.at) - 1)
        return tokens / (self.at[-1] - self.at[0])

    @property
    def slow_rate(self) -> float:
        """Share of slow requests in the measured steps."""
        return statistics.fmean(read.slow for reads in self.measured for read in reads)

    def over(self, limit: float | None) -> bool:
        """Say whether the run has measured `LEAST_STEPS`, for more than `limit` seconds."""
        if limit is None or self.steps < LEAST_STEPS:
            return False
        return self.at[-1] - self.at[self.warm_up] > limit


@dataclass(slots=True)
class Prompts:
    """What the runs at a point decode: prompts, and the tokens after them."""

    ids_BT: torch.Tensor  # left-padded tokens, of which a run reads the last one
    mask_BT: torch.Tensor  # 1 for a token of the prompt, 0 for padding
    made_up: SyntheticPrompt  # the random cache in place of a prefill
    token_SB: list[list[int]]  # token x_t of each request by step, from step 0 to the last

    @classmethod
    def of(cls, settings: DecodeSettings, point: Point, vocabulary: int, device: torch.device) -> "Prompts":
        """Make the prompts of a point, slow at the settings' rate."""
        generator = torch.Generator(device).manual_seed(settings.seed)
        shape = (point.batch, point.context)
        ids_BT = torch.randint(1, vocabulary, shape, generator=generator, device=device)
        lengths_B = torch.tensor(point.contexts, device=device)
        place_T = torch.arange(point.context, device=device)
        mask_BT = (place_T >= point.context - lengths_B[:, None]).long()
        made_up = SyntheticPrompt(point.contexts, settings.capacity(point.context), seed=settings.seed)
        token_BS = [_tokens(settings, request, point.batch, vocabulary) for request in range(point.batch)]
        return cls(ids_BT, mask_BT, made_up, [list(step) for step in zip(*token_BS, strict=True)])


def _tokens(settings: DecodeSettings, request: int, batch: int, vocabulary: int) -> list[int]:
    rate, delay, warm_up = settings.slow_rate, settings.config.trigger_delay, settings.warm_up
    rng = random.Random(f"{settings.seed} {request}")  # noqa: S311 - no secret
    tokens = [rng.randrange(TRIGGER + 1, vocabulary) for _ in range(settings.most_tokens)]
    slow = [1 + warm_up + step for step in slow_steps(rate, request, batch, settings.most_tokens - 1 - warm_up)]
    if rate > 0:  # the warm-up has every kind of step: all slow, one slow, all fast
        slow += [1 + delay, *([2 + delay] if request == 0 else [])][: max(0, warm_up - delay)]
    for step in slow:
        tokens[step - 1 - delay] = TRIGGER
    return tokens


def slow_steps(rate: Fraction, request: int, batch: int, count: int) -> list[int]:
    """Return the slow steps of a request among the first `count` measured steps: evenly apart, staggered over requests.

    At a rate of 1/n, request r is slow at step r n / batch and at every n-th step from there.
    """
    if rate == 0:
        return []
    offset = math.floor(request / (rate * batch))
    return [step for step in range(count) if math.ceil((step - offset + 1) * rate) > math.ceil((step - offset) * rate)]


@dataclass(slots=True)
class BenchRow:
    """A row of the benchmark: a variant at a point, what its runs decode and need, and what they took."""

    model: Any  # the model, outside `slow_fast`
    variant: DecodeVariant
    point: Point
    settings: DecodeSettings
    prompts: Prompts
    bytes_read: ByteModel  # the bytes of the variant's steps
    needed_bytes: int = 0  # memory that a run needs besides the model
    on_step: Callable[[DecodeSample], None] = lambda _: None  # called with the sample after every step
    samples: list[DecodeSample] = field(default_factory=list)  # one of each repeat
