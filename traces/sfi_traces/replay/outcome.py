"""What a setting costs and keeps, step by step and in sum."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_traces.model.supports import Bools, Floats, Ints

LOW = 5  # percentile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMetrics:
    """One request's steps, predicted or measured: N steps, U pairs of a layer and a KV head.

    Attributes:
        reasons: Why each step is slow; empty for a fast one.
        length_N: Cached tokens.
        attended_N: Tokens read per KV head, the mean over full-attention layers.
        lower_NU: Retained mass, lower bound; 1 at slow steps, NaN where not measured.
        upper_NU: Retained mass, upper bound.
        overlap_NU: Overlap coefficient with the support at the last slow step; NaN at slow steps.
        bytes_N: Bytes read for each token.
        dense_bytes_N: The same under full attention.
    """

    request: int
    layer_U: Ints
    head_U: Ints
    reasons: list[str]
    length_N: Ints
    attended_N: npt.NDArray[Any]
    lower_NU: Floats
    upper_NU: Floats
    overlap_NU: Floats
    bytes_N: npt.NDArray[Any]
    dense_bytes_N: npt.NDArray[Any]

    @property
    def slow_N(self) -> Bools:
        """Which steps are slow."""
        return np.array([bool(reason) for reason in self.reasons])


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """Where a fast step kept least."""

    retained_mass: float
    request: int
    step: int
    layer: int
    head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A setting summed up over requests; step 0, the prefill's last position, counts as a slow step only.

    Attributes:
        slow_steps: Slow steps, step 0 of each request included.
        slow_rate: Share of slow steps from step 1 on.
        retained_mass: Mean over fast steps, layers and heads, lower bound; 1 without fast steps.
        retained_mass_upper: The same, upper bound.
        retained_mass_p5: 5th percentile of the lower bound.
        worst: None without fast steps.
        overlap_at_reuse: Mean overlap coefficient of a fast step's support with the last slow step's.
        attended_tokens: Mean tokens read per decoding step and KV head.
        read_ratio: Share of the cached tokens read by decoding steps.
        bytes_per_token: Bytes read for a generated token.
        dense_bytes_per_token: The same under full attention.
        speedup: Speed-up of decoding over full attention, if memory is the bottleneck.
    """

    slow_steps: int
    fast_steps: int
    reasons: dict[str, int]
    slow_rate: float
    retained_mass: float
    retained_mass_upper: float
    retained_mass_p5: float
    worst: Worst | None
    overlap_at_reuse: float | None
    attended_tokens: float
    read_ratio: float
    bytes_per_token: float
    dense_bytes_per_token: float
    speedup: float

    @classmethod
    def of(cls, requests: Sequence[StepMetrics]) -> Self:
        """Sum up requests, every decoding step with the same weight."""
        reasons = Counter(reason for one in requests for reason in one.reasons if reason)
        slow, steps = reasons.total(), sum(len(one.reasons) for one in requests)
        decoded = steps - len(requests)
        lower, upper = (_known(requests, name) for name in ("lower_NU", "upper_NU"))
        overlap = _known(requests, "overlap_NU")
        read, context, bytes_, dense = (
            sum(float(getattr(one, name)[1:].sum()) for one in requests)
            for name in ("attended_N", "length_N", "bytes_N", "dense_bytes_N")
        )
        each = max(1, decoded)
        return cls(
            slow_steps=slow,
            fast_steps=steps - slow,
            reasons=dict(reasons),
            slow_rate=(slow - len(requests)) / each,
            retained_mass=_mean(lower),
            retained_mass_upper=_mean(upper),
            retained_mass_p5=float(np.percentile(lower, LOW)) if len(lower) else 1.0,
            worst=_worst(requests),
            overlap_at_reuse=_mean(overlap) if len(overlap) else None,
            attended_tokens=read / each,
            read_ratio=read / context if context else 1.0,
            bytes_per_token=bytes_ / each,
            dense_bytes_per_token=dense / each,
            speedup=dense / bytes_ if bytes_ else 1.0,
        )


def pareto(outcomes: Sequence[Outcome]) -> list[bool]:
    """Mark the outcomes that no other beats in speed-up and retained mass."""
    points = [(one.speedup, one.retained_mass) for one in outcomes]
    best, front = -1.0, set()
    for speedup, kept in sorted(points, reverse=True):
        if kept > best:
            best = kept
            front.add((speedup, kept))
    return [point in front for point in points]


def _known(requests: Sequence[StepMetrics], name: str) -> Floats:
    values = [getattr(one, name)[~one.slow_N].ravel() for one in requests]
    pooled = np.concatenate(values)
    known: Floats = pooled[~np.isnan(pooled)]
    return known


def _mean(values: Floats) -> float:
    return float(values.mean(dtype=np.float64)) if len(values) else 1.0


def _worst(requests: Sequence[StepMetrics]) -> Worst | None:
    found = []
    for one in requests:
        kept_NU = np.where(one.slow_N[:, None] | np.isnan(one.lower_NU), np.inf, one.lower_NU)
        step, unit = np.unravel_index(int(kept_NU.argmin()), kept_NU.shape)
        if np.isfinite(kept_NU[step, unit]):
            found.append(
                Worst(
                    retained_mass=float(kept_NU[step, unit]),
                    request=one.request,
                    step=int(step),
                    layer=int(one.layer_U[unit]),
                    head=int(one.head_U[unit]),
                )
            )
    return min(found, key=lambda worst: worst.retained_mass, default=None)
