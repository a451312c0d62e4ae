"""What a setting costs and keeps, step by step and in sum."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from sfi_traces.model.steps import Bools, Floats
from sfi_traces.model.supports import Supports

LOW = 5  # percentile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMetrics:
    """One request's steps, predicted or measured: N steps, U pairs of a layer and a KV head.

    Attributes:
        reasons: Why each step is slow; empty for a fast one.
        attended_N: Tokens read per KV head, the mean over full-attention layers.
        lower_NU: Retained mass, lower bound, `upper_NU` the upper one; 1 at slow steps, NaN where not measured.
        overlap_NU: Overlap coefficient with the support at the last slow step; NaN at slow steps.
        bytes_N: Bytes read for each token; `dense_bytes_N` under full attention.
    """

    supports: Supports
    reasons: list[str]
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

    def fast_NU(self, name: str) -> Floats:
        """Return a field's values, NaN at slow steps."""
        return np.where(self.slow_N[:, None], np.nan, getattr(self, name))

    def without_overlap(self) -> Self:
        """Leave the overlaps out, as unknown."""
        return replace(self, overlap_NU=np.full_like(self.overlap_NU, np.nan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A setting summed up over requests; step 0, the prefill's last position, counts as a slow step only.

    Attributes:
        slow_rate: Share of slow steps from step 1 on.
        retained_mass: Mean over fast steps, layers and heads, lower bound; 1 without fast steps.
        retained_mass_p5: 5th percentile of the lower bound.
        worst: Where a fast step kept least; None without fast steps.
        overlap_at_reuse: Mean overlap coefficient of a fast step's support with the last slow step's.
        attended_tokens: Mean tokens read per decoding step and KV head.
        read_ratio: Share of the cached tokens read by decoding steps.
        bytes_per_token: Bytes read for a generated token.
        speedup: Speed-up of decoding over full attention, if memory is the bottleneck.
    """

    slow_steps: int
    fast_steps: int
    reasons: dict[str, int]
    slow_rate: float
    retained_mass: float
    retained_mass_upper: float
    retained_mass_p5: float
    worst: dict[str, Any] | None
    overlap_at_reuse: float | None
    attended_tokens: float
    read_ratio: float
    bytes_per_token: float
    dense_bytes_per_token: float
    speedup: float

    @classmethod
    def of(cls, requests: Sequence[StepMetrics]) -> Self:
        """Sum up requests, every decoding step with the same weight."""
        reasons = Counter(reason for request in requests for reason in request.reasons if reason)
        slow, steps = reasons.total(), sum(len(request.reasons) for request in requests)
        decoded = steps - len(requests)
        lower, upper, overlap = (
            known(request.fast_NU(name) for request in requests) for name in ("lower_NU", "upper_NU", "overlap_NU")
        )
        read, bytes_, dense = (
            sum(float(getattr(request, name)[1:].sum()) for request in requests)
            for name in ("attended_N", "bytes_N", "dense_bytes_N")
        )
        context = sum(float(request.supports.length_N[1:].sum()) for request in requests)
        each = max(1, decoded)
        return cls(
            slow_steps=slow,
            fast_steps=steps - slow,
            reasons=dict(reasons),
            slow_rate=(slow - len(requests)) / each,
            retained_mass=1.0 if (mass := mean(lower)) is None else mass,
            retained_mass_upper=1.0 if (most := mean(upper)) is None else most,
            retained_mass_p5=float(np.percentile(lower, LOW)) if len(lower) else 1.0,
            worst=least("retained_mass", [(request.supports, request.fast_NU("lower_NU")) for request in requests]),
            overlap_at_reuse=mean(overlap),
            attended_tokens=read / each,
            read_ratio=read / context if context else 1.0,
            bytes_per_token=bytes_ / each,
            dense_bytes_per_token=dense / each,
            speedup=dense / bytes_ if bytes_ else 1.0,
        )


def pareto(outcomes: Sequence[Outcome]) -> list[bool]:
    """Mark the outcomes that no other beats in speed-up and retained mass."""
    points = [(outcome.speedup, outcome.retained_mass) for outcome in outcomes]
    best, front = -1.0, set()
    for speedup, mass in sorted(points, reverse=True):
        if mass > best:
            best = mass
            front.add((speedup, mass))
    return [point in front for point in points]


def least(name: str, values: Iterable[tuple[Supports, Floats]]) -> dict[str, Any] | None:
    """Find the least of all requests' values, [N, U], as `name`, with its place; None if all are NaN."""
    places = []
    for supports, value_NU in values:
        if not np.isnan(value_NU).all():
            step, unit = np.unravel_index(int(np.nanargmin(value_NU)), value_NU.shape)
            place = {"step": int(step), "layer": int(supports.layer_U[unit]), "head": int(supports.head_U[unit])}
            places.append({name: float(value_NU[step, unit]), "request": supports.request, **place})
    return min(places, key=lambda place: place[name], default=None)


def known(values: Iterable[Floats]) -> Floats:
    """Join values that are not NaN."""
    pooled = np.concatenate([value.ravel() for value in values])
    return np.asarray(pooled[~np.isnan(pooled)])


def mean(values: Floats) -> float | None:
    """Average values; None without any."""
    return float(values.mean(dtype=np.float64)) if len(values) else None
