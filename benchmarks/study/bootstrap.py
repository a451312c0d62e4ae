"""95 % bootstrap intervals over windows (Efron 1979): whole windows are drawn within each kind of text.

Where a kind has a single window, the kinds are drawn as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

RESAMPLES = 4000
EDGES = (0.025, 0.975)

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic and its 95 % percentile interval.

    Attributes:
        value: The statistic of all windows.
        low: The lower end; NaN where it has no interval.
        high: The upper end.
    """

    value: float
    low: float
    high: float

    def text(self, digits: int = 3, scale: float = 1) -> str:
        """Write value and interval with so many significant digits; a dash for what is not a number."""
        if np.isnan(self.value):
            return "-"
        value, low, high = (_write(scale * number, digits) for number in (self.value, self.low, self.high))
        return value if np.isnan(self.low) else f"{value} ({low} to {high})"


def estimate(values: Mapping[str, Array], statistic: Callable[[Array], Array] = lambda mean: mean[..., 0]) -> Estimate:
    """Give a statistic of a mean over kinds its interval.

    Args:
        values: For each kind, what its windows measured: [windows, columns]. Kinds weigh the same.
        statistic: Takes means of the columns, [..., columns], and returns [...].
    """
    return estimates(values, lambda mean: statistic(mean)[..., None])[0]


def estimates(values: Mapping[str, Array], statistic: Callable[[Array], Array] = lambda mean: mean) -> list[Estimate]:
    """Give several statistics of a mean over kinds their intervals; the statistic returns [..., statistics].

    Columns may hold NaN where a window has no such steps: the mean is over the windows that have. What is not
    a number in some resamples has its interval from the others. A single window gives no interval.
    """
    rng = np.random.default_rng(0)
    kinds = [values[kind] for kind in sorted(values)]
    value_S = statistic(mean_known(np.stack([mean_known(window_NC, 0) for window_NC in kinds]), 0))
    drawn_KRC = np.stack([_drawn(window_NC, rng) for window_NC in kinds])
    if min(map(len, kinds)) < 2:  # noqa: PLR2004 - it would be drawn again and again
        if len(kinds) < 2:  # noqa: PLR2004
            return [Estimate(float(value), np.nan, np.nan) for value in value_S]
        drawn_KRC = drawn_KRC[rng.integers(len(kinds), size=(len(kinds), RESAMPLES)), np.arange(RESAMPLES)]
    value_RS = statistic(mean_known(drawn_KRC, 0))
    return [Estimate(float(value), *_ends(value_R)) for value, value_R in zip(value_S, value_RS.T, strict=True)]


def _drawn(window_NC: Array, rng: np.random.Generator) -> Array:
    # means of as many windows of a kind, drawn anew: [RESAMPLES, columns]
    return mean_known(window_NC[rng.integers(len(window_NC), size=(RESAMPLES, len(window_NC)))], 1)


def _ends(value_R: Array) -> tuple[float, float]:
    known = value_R[np.isfinite(value_R)]
    if len(known) < RESAMPLES / 2:
        return np.nan, np.nan
    low, high = np.quantile(known, EDGES)
    return float(low), float(high)


def mean_known(values: Array, axis: int) -> Array:
    """Return the mean of what is a number; NaN where nothing is, without numpy's warning."""
    known = ~np.isnan(values)
    total, count = np.where(known, values, 0).sum(axis), known.sum(axis)
    mean: Any = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return np.asarray(mean)


def _write(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    return f"{value:#.{digits}g}".rstrip(".") if abs(value) >= 1e-4 else f"{value:.5f}"  # noqa: PLR2004
