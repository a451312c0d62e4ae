"""The settings of the benchmark, and the points that it measures. No torch: the command line imports this."""

from dataclasses import dataclass, field
from fractions import Fraction

from sfi_core.errors import ConfigError, unknown
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions

BASELINES = ("transformers-dynamic", "transformers-static")
LEAST_STEPS = 3  # a run measures at least so many, whatever its time limit
TRIGGER = 0  # the token id that makes a step slow under a stated rate


@dataclass(frozen=True, slots=True)
class Point:
    """A context length and a batch."""

    context: int  # cached tokens of a request; in a ragged batch, of the longest request
    batch: int
    ragged: bool = False  # whether contexts fall evenly from `context` to half of it

    @property
    def contexts(self) -> list[int]:
        """Cached tokens of each request."""
        if not self.ragged or self.batch == 1:
            return [self.context] * self.batch
        step = self.context / 2 / (self.batch - 1)
        return [round(self.context - row * step) for row in range(self.batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """One run of the benchmark."""

    policies: tuple[str, ...] = ("sfi", "codescan", "full-kv")  # names from `sfi_core.policies.POLICIES`
    contexts: tuple[int, ...] = (4096, 16384, 32768)
    batches: tuple[int, ...] = (1,)
    baselines: tuple[str, ...] = BASELINES  # names from `BASELINES`
    steps: int = 40  # decoding steps measured in each run, after those of the warm-up
    warm_up: int = 4
    repeats: int = 3
    # seconds after which a run stops, once it measured `LEAST_STEPS`; None for no limit
    time_limit: float | None = None
    slow_rate: Fraction = Fraction(1, 20)  # share of steps at which a request is slow
    ragged: bool = False  # see `Point`
    # the stated chance that a tested token of a lossless run is kept, in [0, 1]; None for no such runs
    acceptance: float | None = None
    seed: int = 0
    config: SfiConfig = field(default_factory=SfiConfig)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        """Refuse settings that cannot be measured."""
        self._check_names()
        # half of a ragged context must be a token
        for name, least in {"contexts": 2, "batches": 1, "steps": 1, "warm_up": 0, "repeats": 1}.items():
            value = getattr(self, name)
            if (min(value, default=0) if isinstance(value, tuple) else value) < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.time_limit is not None and self.time_limit <= 0:
            raise ConfigError(f"time_limit must be positive, got {self.time_limit}")
        for name, share in (("slow_rate", self.slow_rate), ("acceptance", self.acceptance)):
            if share is not None and not 0 <= share <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {float(share):g}")
        if self.warm_up < self.config.trigger_delay:
            raise ConfigError(
                f"warm_up must be at least trigger_delay ({self.config.trigger_delay}), got {self.warm_up}"
            )

    def _check_names(self) -> None:
        for baseline in self.baselines:
            if baseline not in BASELINES:
                raise unknown("baseline", baseline, BASELINES)
        if not self.policies and not self.baselines:
            raise ConfigError("policy must name at least one, got none")

    @property
    def lossless(self) -> bool:
        """Whether policies that can draft are measured in lossless runs too."""
        return self.acceptance is not None

    @property
    def total_steps(self) -> int:
        """Decoding steps of a run."""
        return self.warm_up + self.steps

    @property
    def most_tokens(self) -> int:
        """The most tokens of a request; in a lossless run a request may get ahead of the others."""
        if not self.lossless:
            return self.total_steps + 1
        return 2 * (self.total_steps + self.config.draft.max_tokens + 1)

    @property
    def run_config(self) -> SfiConfig:
        """The settings of our policies, under which the given tokens decide the slow steps."""
        return self.config.replace(
            trigger_policy="boundary", trigger_token_ids=(TRIGGER,), slow_start=1, min_gap=0, t_max=self.most_tokens
        )

    def capacity(self, context: int) -> int:
        """Return the most cached tokens of a request; the last token is not cached."""
        return context + self.most_tokens - 1

    def points(self) -> list[Point]:
        """Return the points, short contexts and small batches first."""
        return [
            Point(context, batch, self.ragged)
            for context in sorted(set(self.contexts))
            for batch in sorted(set(self.batches))
        ]
