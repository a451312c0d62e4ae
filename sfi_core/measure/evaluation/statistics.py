"""Confidence intervals of means of a few samples."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959964  # two-sided 95 % of the normal distribution
RESAMPLES = 10_000
EDGES = (0.025, 0.975)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean of `n` samples and its 95 % confidence interval from `low` to `high`."""

    mean: float
    low: float
    high: float
    n: int


def wilson(scores: Sequence[float]) -> Interval:
    """Compute the Wilson score interval of the mean of scores in [0, 1] (Wilson 1927, JASA 22, 209-212).

    The interval holds for scores of 0 and 1. Scores between have at most the variance of such scores with the
    same mean: for them the interval is wider than necessary. Raise `ValueError` if there is no score, or a score is
    outside [0, 1].
    """
    n = len(scores)
    if n == 0 or not 0 <= min(scores) <= max(scores) <= 1:
        raise ValueError(f"scores must be in [0, 1] and at least one, got {list(scores)}")
    mean, weight = math.fsum(scores) / n, 1 + Z**2 / n
    center = (mean + Z**2 / (2 * n)) / weight
    half = Z / weight * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    # ends that are exactly 0 or 1 (or the mean) must not be off by rounding
    low, high = max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))
    return Interval(mean, low, high, n)


def paired_difference(scores: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Interval:
    """Compute a percentile bootstrap interval of the mean of `scores - others` on the same samples.

    Pairs are drawn together, so that a sample's difficulty for both methods cancels (Efron 1979; 10,000
    resamples). If all differences are equal, the interval has no width. Raise `ValueError` if there is no pair, or one
    method has more scores than the other.
    """
    if not scores or len(scores) != len(others):
        raise ValueError(f"scores must come in pairs, got {len(scores)} and {len(others)}")
    difference = np.subtract(scores, others)
    n = len(difference)
    means = difference[np.random.default_rng(seed).integers(n, size=(RESAMPLES, n))].mean(1)
    low, high = map(float, np.quantile(means, EDGES))
    return Interval(float(difference.mean()), low, high, n)
