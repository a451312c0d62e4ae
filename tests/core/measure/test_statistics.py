"""Intervals against values computed by hand."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from sfi_core.measure.evaluation import statistics
from sfi_core.measure.evaluation.statistics import (
    RESAMPLES,
    Z,
    bootstrap,
    difference_of_groups,
    mean_of_groups,
    paired_difference,
    wilson,
)

SKEWED = [0.0] * 12 + [0.1, 0.2, 0.4, 1.0]


def without_scipy(monkeypatch):
    monkeypatch.setattr(statistics, "find_spec", lambda name: None)


def resampled_means(values: list[float]) -> np.ndarray:
    drawn = np.random.default_rng(1).integers(len(values), size=(100_000, len(values)))
    return np.array(values)[drawn].mean(1)


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_interval_is_the_published_one(right, n, low, high):
    found = wilson([1.0] * right + [0.0] * (n - right))
    assert found.mean == right / n
    assert found.n == n
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


def test_paired_difference_cancels_what_is_hard_for_both():
    hard = [0.0, 1.0] * 10
    found = paired_difference(hard, hard)
    assert (found.mean, found.low, found.high, found.n) == (0.0, 0.0, 0.0, 20)


def test_paired_interval_of_two_samples_is_their_range():
    """Of the four equally likely resamples one is all of either, so 2.5 % lies within it."""
    found = paired_difference([1.0, 0.5], [0.0, 0.5])
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)


def test_paired_difference_refuses_what_is_not_paired():
    with pytest.raises(ValueError, match="scores must come in pairs, got 2 and 1"):
        paired_difference([1.0, 0.0], [1.0])


def test_with_scipy_the_interval_is_bca():
    """Efron 1987: quantiles at Phi(z0 + (z0 + z) / (1 - a (z0 + z))); here from resamples of our own."""
    pytest.importorskip("scipy")
    values, means, normal = np.array(SKEWED), resampled_means(SKEWED), NormalDist()
    below = ((means < values.mean()).mean() + (means <= values.mean()).mean()) / 2
    bias, centered = normal.inv_cdf(below), values.mean() - values
    skew = -(centered**3).sum() / (6 * (centered**2).sum() ** 1.5)
    ends = [np.quantile(means, normal.cdf(bias + (bias + z) / (1 - skew * (bias + z)))) for z in (-Z, Z)]
    found = paired_difference(SKEWED, [0.0] * len(SKEWED))
    assert found.method == "BCa"
    assert [found.low, found.high] == pytest.approx(ends, abs=0.01)
    assert found.high > np.quantile(means, 0.975) + 0.02  # the tail of the samples lies above


def test_without_scipy_the_interval_is_the_percentiles(monkeypatch):
    without_scipy(monkeypatch)
    found = paired_difference(SKEWED, [0.0] * len(SKEWED))
    assert found.method == "percentile"
    ends = np.quantile(resampled_means(SKEWED), (0.025, 0.975))
    assert [found.low, found.high] == pytest.approx(ends, abs=0.01)


@pytest.mark.parametrize("values", [[0.25], [0.25] * 9, [0.0] * 3])
def test_where_bca_is_not_defined_the_interval_has_no_width(values):
    found = paired_difference(values, [0.0] * len(values))
    assert (found.low, found.high, found.method) == (values[0], values[0], "percentile")


@pytest.mark.parametrize("scipy", [True, False])
def test_samples_are_drawn_with_what_belongs_to_them(monkeypatch, scipy):
    """A sum that is always twice its count has a ratio without doubt."""
    if scipy:
        pytest.importorskip("scipy")
    else:
        without_scipy(monkeypatch)
    counts = np.array([1.0, 5.0, 2.0, 8.0, 3.0])

    def ratio(sums, counts, axis):
        return sums.sum(axis) / counts.sum(axis)

    low, high, _ = bootstrap([2 * counts, counts], ratio, resamples=RESAMPLES, seed=0)
    assert (low, high) == (2.0, 2.0)


RIGHT, HALF = [1.0] * 20, [1.0, 0.0] * 5


def test_the_ends_of_groups_are_movers():
    """L = m - sqrt(sum (w_i (m_i - l_i))^2), U likewise (Zou and Donner 2008), by hand."""
    one, other = wilson(RIGHT), wilson(HALF)
    found = mean_of_groups([RIGHT, HALF])
    assert found.mean == pytest.approx(0.75)
    assert found.low == pytest.approx(0.75 - 0.5 * math.hypot(1 - one.low, 0.5 - other.low))
    assert found.high == pytest.approx(0.75 + 0.5 * math.hypot(one.high - 1, other.high - 0.5))


def test_a_difference_is_resampled_within_its_groups():
    """Differences that are equal within each group leave nothing to chance."""
    found = difference_of_groups([[1.0] * 5, [-1.0] * 4])
    assert (found.mean, found.low, found.high, found.n) == (0.0, 0.0, 0.0, 9)
    mixed = difference_of_groups([[1.0] * 5, [-1.0, 0.0] * 8])
    drawn = np.random.default_rng(2).integers(2, size=(100_000, 16)).mean(1) - 1
    low, high = np.quantile(0.5 + 0.5 * drawn, (0.025, 0.975))
    assert (mixed.low, mixed.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))
