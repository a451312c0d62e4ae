"""Confidence intervals of a weighted mean over groups of samples that were drawn apart."""

import math
from collections.abc import Sequence

import numpy as np

from sfi_core.measure.evaluation.statistics import EDGES, RESAMPLES, Interval, wilson

Strata = Sequence[tuple[float, Sequence[float]]]


def weighted_mean(strata: Strata) -> Interval:
    """Give a weighted mean of groups of scores in [0, 1] its 95 % interval; see `mover`.

    Args:
        strata: A positive weight and at least one score for each group; weights need not sum to 1.

    Raises:
        ValueError: There is no group, a weight is not positive, or a group is no scores.
    """
    shares = _shares(strata)
    return mover(list(zip(shares, [wilson(scores) for _, scores in strata], strict=True)))


def mover(parts: Sequence[tuple[float, Interval]]) -> Interval:
    """Give a weighted mean of means its 95 % interval.

    Each end is as far from the mean as the ends of the groups are from theirs, by squares: MOVER (Zou and
    Donner 2008, Statistics in Medicine 27, 1693-1702), with Wilson intervals as Newcombe (1998) took them
    for a difference. For one group it is the group's interval. It has a width where all scores are right,
    which neither a bootstrap nor a normal interval has, and groups may differ in size and mean.

    Args:
        parts: A weight and the Wilson interval of each group; the weights sum to 1.
    """
    mean = math.fsum(share * part.mean for share, part in parts)
    below = math.hypot(*(share * (part.mean - part.low) for share, part in parts))
    above = math.hypot(*(share * (part.high - part.mean) for share, part in parts))
    n = sum(part.n for _, part in parts)
    return Interval(mean, max(0.0, mean - below), min(1.0, mean + above), n, "Wilson, MOVER")


def weighted_difference(strata: Strata, *, seed: int = 0) -> Interval:
    """Give a weighted mean of groups of paired differences a stratified bootstrap interval, by percentiles.

    Each resample draws every group's pairs anew, as many as the group has (10,000 resamples).

    Args:
        strata: A positive weight and at least one difference for each group.
        seed: The seed of the resampling.

    Raises:
        ValueError: There is no group, a weight is not positive, or a group is empty.
    """
    shares = _shares(strata)
    rng = np.random.default_rng(seed)
    mean, resampled = 0.0, np.zeros(RESAMPLES)
    for share, (_, found) in zip(shares, strata, strict=True):
        values = np.asarray(found, dtype=float)
        mean += share * float(values.mean())
        resampled += share * values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(
            1
        )
    low, high = map(float, np.quantile(resampled, EDGES))
    return Interval(mean, low, high, sum(len(found) for _, found in strata), "stratified")


def _shares(strata: Strata) -> list[float]:
    weights = [weight for weight, _ in strata]
    if not weights or min(weights) <= 0 or not all(len(found) for _, found in strata):
        raise ValueError(f"groups must have positive weights and samples, got weights {weights}")
    total = math.fsum(weights)
    return [weight / total for weight in weights]
