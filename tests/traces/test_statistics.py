"""Intervals against values computed by hand."""

import numpy as np
import pytest

from sfi_traces.results import paired_difference, wilson

SKEWED = [0.0] * 12 + [0.1, 0.2, 0.4, 1.0]


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


def test_the_paired_interval_is_the_percentiles_of_resamples():
    found = paired_difference(SKEWED, [0.0] * len(SKEWED))
    drawn = np.random.default_rng(1).integers(len(SKEWED), size=(100_000, len(SKEWED)))
    ends = np.quantile(np.array(SKEWED)[drawn].mean(1), (0.025, 0.975))
    assert [found.low, found.high] == pytest.approx(ends, abs=0.01)
