"""Confidence intervals of a mean of a few samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # two-sided 95 % of the normal distribution
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its 95 % confidence interval.

    Attributes:
        mean: The mean of the samples.
        low: The lower end.
        high: The upper end.
        n: The number of samples.
    """

    mean: float
    low: float
    high: float
    n: int


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
    mean = math.fsum(scores) / n
    weight = 1 + Z**2 / n
    center = (mean + Z**2 / (2 * n)) / weight
    half = Z / weight * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    # the ends at 0 and 1 are exact; floating point misses them by a rounding
    return Interval(mean, max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half)), n)


def paired_difference(
    scores: Sequence[float], others: Sequence[float], *, seed: int = 0
) -> Interval:
    """Give the mean of `scores - others` on the same samples a bootstrap interval.

    Samples are drawn with their pairs, so that what makes a sample hard for both cancels
    (Efron 1979; percentile interval of 10,000 resamples). Where all differences are equal the
    interval has no width: it knows of no difference that no sample showed.

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
    n = len(difference)
    drawn = np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))
    low, high = np.quantile(difference[drawn].mean(1), (0.025, 0.975))
    return Interval(float(difference.mean()), float(low), float(high), n)
