"""Confidence intervals of means of a few samples, and of means over groups of samples."""

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
    """A mean of `n` samples and its 95 % confidence interval from `low` to `high`.

    `method` is "Wilson", "BCa", "percentile", "Wilson, MOVER" or "stratified".
    """

    mean: float
    low: float
    high: float
    n: int
    method: str


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
    return Interval(mean, low, high, n, "Wilson")


def paired_difference(scores: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Interval:
    """Compute a bootstrap interval of the mean of `scores - others` on the same samples.

    Pairs are drawn together, so that a sample's difficulty for both methods cancels (Efron 1979; 10,000
    resamples). If all differences are equal, the interval has no width. Raise `ValueError` if there is no pair, or one
    method has more scores than the other.
    """
    if not scores or len(scores) != len(others):
        raise ValueError(f"scores must come in pairs, got {len(scores)} and {len(others)}")
    difference = np.subtract(scores, others)
    low, high, method = bootstrap([difference], lambda drawn, axis: drawn.mean(axis), resamples=RESAMPLES, seed=seed)
    return Interval(float(difference.mean()), low, high, len(difference), method)


def bootstrap(
    samples: Sequence[Array], statistic: Callable[..., Array], *, resamples: int, seed: int
) -> tuple[float, float, str]:
    """Compute a statistic's 95 % bootstrap interval; return both ends, and "BCa" or "percentile".

    With SciPy, the BCa interval (Efron 1987), which corrects for bias and skew. Without SciPy, and for a
    single sample or equal samples, where BCa is not defined, the percentile interval. Values of one index in
    `samples` are drawn together; `statistic` takes the arrays and `axis`, the axis of the samples.
    """
    low, high = _bca(samples, statistic, resamples, seed)
    if math.isfinite(low) and math.isfinite(high):
        return low, high, "BCa"
    n = len(samples[0])
    drawn = np.random.default_rng(seed).integers(n, size=(resamples, n))
    values = statistic(*(sample[drawn] for sample in samples), axis=1)
    low, high = map(float, np.quantile(values, EDGES))
    return low, high, "percentile"


def _bca(samples: Sequence[Array], statistic: Callable[..., Array], resamples: int, seed: int) -> tuple[float, float]:
    # NaN if the interval is not defined
    if find_spec("scipy") is None or len(samples[0]) == 1:
        return math.nan, math.nan
    from scipy.stats import bootstrap as scipy_bootstrap  # noqa: PLC0415 - an extra

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # SciPy warns of an undefined interval
        low, high = scipy_bootstrap(
            samples, statistic, n_resamples=resamples, vectorized=True, paired=True, axis=0, method="BCa",
            random_state=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    return float(low), float(high)


def mean_of_groups(groups: Sequence[Sequence[float]]) -> Interval:
    """Compute the 95 % interval of the mean of groups' means, for scores in [0, 1] (MOVER).

    The distances of the groups' Wilson ends from the groups' means add by squares (Zou and Donner 2008,
    Statistics in Medicine 27, 1693-1702; Newcombe 1998 for a difference). The interval has a width even if
    all scores are right; groups may differ in size and mean. Raise `ValueError` if there is no group, a group is
    empty, or a score is outside [0, 1].
    """
    share, parts = _share(groups), [wilson(scores) for scores in groups]
    mean = math.fsum(share * part.mean for part in parts)
    below = math.hypot(*(share * (part.mean - part.low) for part in parts))
    above = math.hypot(*(share * (part.high - part.mean) for part in parts))
    n = sum(part.n for part in parts)
    return Interval(mean, max(0.0, mean - below), min(1.0, mean + above), n, "Wilson, MOVER")


def difference_of_groups(groups: Sequence[Sequence[float]], *, seed: int = 0) -> Interval:
    """Compute a stratified bootstrap interval of the mean of groups' means, for paired differences.

    Each of 10,000 resamples draws from every group as many pairs as it has; the ends are percentiles. Raise
    `ValueError` if there is no group, or a group is empty.
    """
    share, rng = _share(groups), np.random.default_rng(seed)
    mean, resampled = 0.0, np.zeros(RESAMPLES)
    for group in groups:
        values = np.asarray(group, dtype=float)
        drawn = values[rng.integers(len(values), size=(RESAMPLES, len(values)))]
        mean += share * float(values.mean())
        resampled += share * drawn.mean(1)
    low, high = map(float, np.quantile(resampled, EDGES))
    return Interval(mean, low, high, sum(map(len, groups)), "stratified")


def _share(groups: Sequence[Sequence[float]]) -> float:
    # a group's share of the mean
    if not groups or not all(map(len, groups)):
        raise ValueError("groups must have samples, got none or an empty one")
    return 1 / len(groups)
