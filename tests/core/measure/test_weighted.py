"""Weighted means of groups of scores, and their intervals."""

import math

import numpy as np
import pytest

from sfi_core.measure.evaluation.statistics import wilson
from sfi_core.measure.evaluation.weighted import weighted_difference, weighted_mean

RIGHT, HALF = [1.0] * 20, [1.0, 0.0] * 5


def test_one_group_has_wilsons_interval():
    found, alone = weighted_mean([(7.0, HALF)]), wilson(HALF)
    assert (found.mean, found.n) == (0.5, 10)
    assert (found.low, found.high) == (pytest.approx(alone.low), pytest.approx(alone.high))


def test_the_ends_are_movers():
    """L = m - sqrt(sum (w_i (m_i - l_i))^2), U likewise (Zou and Donner 2008), by hand."""
    one, other = wilson(RIGHT), wilson(HALF)
    found = weighted_mean([(3, RIGHT), (1, HALF)])
    assert found.mean == pytest.approx(0.75 * 1.0 + 0.25 * 0.5)
    below = math.sqrt((0.75 * (1 - one.low)) ** 2 + (0.25 * (0.5 - other.low)) ** 2)
    above = math.sqrt((0.75 * (one.high - 1)) ** 2 + (0.25 * (other.high - 0.5)) ** 2)
    assert found.low == pytest.approx(0.875 - below)
    assert found.high == pytest.approx(0.875 + above)


@pytest.mark.parametrize("chances", [(0.5, 0.5), (0.95, 0.6), (0.99, 0.9)])
def test_the_interval_covers_the_weighted_chance(chances):
    """Groups of 20 and 8 samples, weights 1 and 2: at least 93 of 100 times for an interval of 95."""
    rng = np.random.default_rng(1)
    wanted = (chances[0] + 2 * chances[1]) / 3
    hits = 0
    for _ in range(1000):
        drawn = [
            (weight, (rng.random(n) < chance).astype(float).tolist())
            for weight, n, chance in zip((1, 2), (20, 8), chances, strict=True)
        ]
        found = weighted_mean(drawn)
        hits += found.low <= wanted <= found.high
    assert hits >= 930


def test_a_difference_is_resampled_within_its_groups():
    """Differences that are equal within each group leave nothing to chance."""
    found = weighted_difference([(1, [1.0] * 5), (3, [-1.0] * 4)])
    assert (found.mean, found.low, found.high, found.n) == (-0.5, -0.5, -0.5, 9)
    mixed = weighted_difference([(1, [1.0] * 5), (1, [-1.0, 0.0] * 8)])
    drawn = np.random.default_rng(2).integers(2, size=(100_000, 16)).mean(1) - 1
    low, high = np.quantile(0.5 + 0.5 * drawn, (0.025, 0.975))
    assert (mixed.low, mixed.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))


@pytest.mark.parametrize("strata", [[], [(0, HALF)], [(1, HALF), (1, [])]])
def test_groups_without_samples_or_weight_are_refused(strata):
    for average in (weighted_mean, weighted_difference):
        with pytest.raises(ValueError, match="groups must have positive weights and samples"):
            average(strata)
