"""Intervals against values computed by hand."""

import math

import pytest

from sfi_core.measure.evaluation.statistics import Z, paired_difference, wilson


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055)],
)
def test_wilson_interval_is_the_published_one(right, n, low, high):
    found = wilson([1.0] * right + [0.0] * (n - right))
    assert found.mean == right / n
    assert found.n == n
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize("scores", [[1.0], [0.0, 1.0, 1.0], [0.25, 0.5, 1.0, 0.1]])
def test_wilson_ends_are_where_the_normal_test_just_fails(scores):
    """|mean - p| = z sqrt(p (1 - p) / n) at both ends, which is how Wilson defines them."""
    found = wilson(scores)
    for end in (found.low, found.high):
        if 0 < end < 1:
            distance = Z * math.sqrt(end * (1 - end) / found.n)
            assert abs(found.mean - end) == pytest.approx(distance, rel=1e-9)


def test_a_certain_score_keeps_its_end():
    assert wilson([1.0] * 7).high == 1.0
    assert wilson([0.0] * 7).low == 0.0


@pytest.mark.parametrize("scores", [[], [1.2], [-0.1, 0.5]])
def test_wilson_refuses_what_is_no_score(scores):
    with pytest.raises(ValueError, match=r"scores must be in \[0, 1\]"):
        wilson(scores)


def test_paired_difference_cancels_what_is_hard_for_both():
    hard = [0.0, 1.0] * 10
    found = paired_difference(hard, hard)
    assert (found.mean, found.low, found.high, found.n) == (0.0, 0.0, 0.0, 20)


def test_paired_interval_of_two_samples_is_their_range():
    """Of the four equally likely resamples one is all of either, so 2.5 % lies within it."""
    found = paired_difference([1.0, 0.5], [0.0, 0.5])
    assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)


def test_paired_interval_narrows_as_the_normal_one_does():
    scores = [1.0, 0.0, 0.0, 1.0] * 100
    found = paired_difference(scores, [0.5] * 400)
    half = Z * 0.5 / math.sqrt(400)
    assert found.mean == 0.0
    assert found.low == pytest.approx(-half, rel=0.1)
    assert found.high == pytest.approx(half, rel=0.1)


def test_paired_interval_follows_from_its_seed():
    scores, others = [0.1, 0.9, 0.4, 1.0, 0.3], [0.3, 0.2, 0.9, 0.8, 0.0]
    assert paired_difference(scores, others) == paired_difference(scores, others)
    assert paired_difference(scores, others) != paired_difference(scores, others, seed=1)


def test_paired_difference_refuses_what_is_not_paired():
    with pytest.raises(ValueError, match="scores must come in pairs, got 2 and 1"):
        paired_difference([1.0, 0.0], [1.0])
