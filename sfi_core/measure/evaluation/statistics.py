"""Confidence intervals of means of a few samples, and of means over groups that were drawn apart."""

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
        method: "Wilson", "BCa", "percentile", "Wilson, MOVER" or "stratified".
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
    mean, weight = math.fsum(scores) / n, 1 + Z**2 / n
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


def mean_of_groups(groups: Sequence[Sequence[float]]) -> Interval:
    """Give the mean of the means of groups of scores in [0, 1] its 95 % interval (MOVER).

    Each end is as far from the mean as the ends of the groups' Wilson intervals are from theirs, by squares
    (Zou and Donner 2008, Statistics in Medicine 27, 1693-1702; Newcombe 1998 for a difference). The interval
    has a width where all scores are right, and groups may differ in size and mean.

    Raises:
        ValueError: There is no group, or a group is no scores.
    """
    share, parts = _share(groups), [wilson(scores) for scores in groups]
    mean = math.fsum(share * part.mean for part in parts)
    below = math.hypot(*(share * (part.mean - part.low) for part in parts))
    above = math.hypot(*(share * (part.high - part.mean) for part in parts))
    n = sum(part.n for part in parts)
    return Interval(mean, max(0.0, mean - below), min(1.0, mean + above), n, "Wilson, MOVER")


def difference_of_groups(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """Give the mean of the means of groups of paired differences a stratified percentile bootstrap interval.

    Each resample draws every group's pairs anew, as many as the group has (10,000 resamples).

    Raises:
        ValueError: There is no group, or a group is empty.
    """
    share, rng = _share(groups), np.random.default_rng(seed)
    mean, resampled = 0.0, np.zeros(RESAMPLES)
    for found in groups:
        values = np.asarray(found, dtype=float)
        drawn = values[rng.integers(len(values), size=(RESAMPLES, len(values)))]
        mean += share * float(values.mean())
        resampled += share * drawn.mean(1)
    low, high = map(float, np.quantile(resampled, EDGES))
    return Interval(mean, low, high, sum(map(len, groups)), "stratified")


def _share(groups: Sequence[Sequence[float]]) -> float:
    # of each group in the mean
    if not groups or not all(map(len, groups)):
        raise ValueError("groups must have samples, got none or an empty one")
    return 1 / len(groups)
