"""Confidence intervals of a mean of a few samples."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

Z = 1.959964  # two-sided 95 % of the normal distribution
RESAMPLES = 10_000
EDGES = (0.025, 0.975)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval.

    Attributes:
        mean: The mean of the samples.
        low: The lower end.
        high: The upper end.
        n: The number of samples.
        method: "Wilson", "BCa" or "percentile".
    """

    mean: float
    low: float
    high: float
    n: int
    method: str


def wilson(scores: Sequence[float]) -> Interval:
    """Give the mean of scores in [0, 1] its Wilson score interval (Wilson 1927, JASA 22, 209-212).

    It is exact in form for scores of 0 and 1. Fractions between have at most the variance of such a
    score of the same mean, so that for them the interval is wider than it needs to be.

    Args:
        scores: At least one score.

    Raises:
        ValueError: There is no score, or one outside [0, 1].
    """
    n = len(scores)
    if n == 0 or not 0 <= min(scores) <= max(scores) <= 1:
        raise ValueError(f"scores must be in [0, 1] and at least one, got {list(scores)}")
    return wilson_of(math.fsum(scores) / n, n)


def wilson_of(mean: float, n: int) -> Interval:
    """Give a mean of `n` scores its Wilson score interval; see `wilson`.

    Raises:
        ValueError: There is no score, or the mean is outside [0, 1].
    """
    if n < 1 or not 0 <= mean <= 1:
        raise ValueError(f"mean must be in [0, 1] and of at least one score, got {mean} of {n}")
    weight = 1 + Z**2 / n
    center = (mean + Z**2 / (2 * n)) / weight
    half = Z / weight * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    # the ends at 0 and 1 are exact; floating point misses them by a rounding
    low, high = max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))
    return Interval(mean, low, high, n, "Wilson")


def paired_difference(
    scores: Sequence[float], others: Sequence[float], *, seed: int = 0
) -> Interval:
    """Give the mean of `scores - others` on the same samples a bootstrap interval.

    Samples are drawn with their pairs, so that what makes a sample hard for both cancels
    (Efron 1979; 10,000 resamples). Where all differences are equal the interval has no width: it
    knows of no difference that no sample showed.

    Args:
        scores: One method's scores, at least one.
        others: The other method's scores, in the same order of samples.
        seed: The seed of the resampling.

    Raises:
        ValueError: There is no pair, or one method has more scores than the other.
    """
    if not scores or len(scores) != len(others):
        raise ValueError(f"scores must come in pairs, got {len(scores)} and {len(others)}")
    difference = np.subtract(scores, others)
    low, high, method = bootstrap(
        [difference], lambda drawn, axis: drawn.mean(axis), resamples=RESAMPLES, seed=seed
    )
    return Interval(float(difference.mean()), low, high, len(difference), method)


def bootstrap(
    samples: Sequence[Array], statistic: Callable[..., Array], *, resamples: int, seed: int
) -> tuple[float, float, str]:
    """Give a statistic its 95 % bootstrap interval.

    With SciPy it is the BCa interval (Efron 1987), which corrects for bias and skew. It is the percentile
    interval without SciPy, and where BCa is not defined: for one sample, or samples that are all equal.

    Args:
        samples: Arrays of one length; what has the same index is drawn together.
        statistic: Takes the arrays and `axis`, the axis of the samples.
        resamples: The number of resamples.
        seed: The seed of the resampling.

    Returns:
        Both ends, and "BCa" or "percentile".
    """
    low, high = _bca(samples, statistic, resamples, seed)
    if math.isfinite(low) and math.isfinite(high):
        return low, high, "BCa"
    n = len(samples[0])
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    values = statistic(*(sample[drawn] for sample in samples), axis=1)
    low, high = map(float, np.quantile(values, EDGES))
    return low, high, "percentile"


def _bca(
    samples: Sequence[Array], statistic: Callable[..., Array], resamples: int, seed: int
) -> tuple[float, float]:
    # not a number where there is no such interval
    if find_spec("scipy") is None or len(samples[0]) == 1:
        return math.nan, math.nan
    from scipy.stats import bootstrap as scipy_bootstrap  # noqa: PLC0415 - an extra

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy's of what is not defined is one
        low, high = scipy_bootstrap(
            samples, statistic, n_resamples=resamples, vectorized=True, paired=True, axis=0, method="BCa",
            random_state=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    return float(low), float(high)
