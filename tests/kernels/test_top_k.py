"""Eq. 24, with its tie rule."""

import pytest
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.top_k import top_k


def by_sorting(scores: list[float], budget: int) -> list[int]:
    """Rank by score, then by position; drop what is masked; ascending; pad."""
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:budget]
    kept = sorted(j for j in ranked if scores[j] > MASKED_SCORE / 2)
    return kept + [-1] * (min(budget, len(scores)) - len(kept))


@pytest.mark.parametrize("length", [1, 63, 256, 1000])
@pytest.mark.parametrize("budget", [1, 7, 64, 2048])
@pytest.mark.parametrize("values", [1, 3, 1000])
def test_top_k_equals_sorting_under_heavy_ties(length: int, budget: int, values: int):
    score = torch.randint(values, (2, 3, length)).float()
    score[0, :, : length // 2] = MASKED_SCORE
    expected = [[by_sorting(row, budget) for row in rows] for rows in score.tolist()]
    assert top_k(score, budget).tolist() == expected


def test_lower_positions_win_a_tie():
    assert top_k(torch.tensor([[[1.0, 2.0, 1.0, 2.0, 1.0]]]), 3).tolist() == [[[0, 1, 3]]]


def test_positions_ascend_whatever_the_scores_do():
    score = torch.arange(9.0).flip(0).view(1, 1, 9)
    assert top_k(score, 4).tolist() == [[[0, 1, 2, 3]]]


def test_the_index_is_int32_and_contiguous():
    index = top_k(torch.randn(2, 3, 50), 8)
    assert (index.dtype, index.shape) == (torch.int32, (2, 3, 8))
    assert index.is_contiguous()


def test_too_few_candidates_are_padded_at_the_end():
    score = torch.full((1, 1, 6), MASKED_SCORE)
    score[..., [2, 5]] = torch.tensor([-3.0, -1.0])
    assert top_k(score, 4).tolist() == [[[2, 5, -1, -1]]]


def test_a_budget_beyond_the_cache_keeps_every_candidate_once():
    assert top_k(torch.randn(1, 1, 3), 10).tolist() == [[[0, 1, 2]]]


def test_no_candidates_select_nothing_beside_a_request_that_has_some():
    score = torch.randn(2, 2, 20)
    score[0] = MASKED_SCORE
    index = top_k(score, 5)
    assert (index[0] == -1).all()
    assert (index[1] >= 0).all()


def test_a_score_lowered_below_the_mask_is_still_masked():
    """Soft-NMS pushes masked scores further down (Eq. 21)."""
    score = torch.tensor([[[1.5 * MASKED_SCORE, 0.6 * MASKED_SCORE, 0.4 * MASKED_SCORE]]])
    assert top_k(score, 3).tolist() == [[[2, -1, -1]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_rank_the_same(dtype: torch.dtype):
    """The mask is -inf in float16."""
    score = torch.randint(9, (2, 3, 50)).float()
    score[1, :, 5:] = MASKED_SCORE
    assert torch.equal(top_k(score.to(dtype), 8), top_k(score, 8))


def test_the_scores_are_left_as_they_were():
    score = torch.randn(1, 2, 30)
    before = score.clone()
    top_k(score, 5)
    assert torch.equal(score, before)


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_that_is_not_positive_is_refused(budget: int):
    with pytest.raises(ValueError, match=f"^budget must be positive, got {budget}$"):
        top_k(torch.zeros(1, 1, 4), budget)


def test_scores_of_another_rank_are_refused():
    with pytest.raises(ValueError, match=r"^score must be \[B, H, T\], got \[4\]$"):
        top_k(torch.zeros(4), 2)
