"""Eqs. 19-23: log scores, soft-NMS and exclusivity across heads."""

import pytest
import torch

from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.selector import exclude_across_heads, log_score, soft_nms
from sfi_kernels.selector.formulas import neighborhood_peak

B, H, T = 2, 3, 50


def test_log_score_is_the_log_inside_and_masked_outside():
    """Eq. 19."""
    z = log_score(torch.tensor([[[0.5, 0.0, 0.5]]]), torch.tensor([[True, True, False]]))
    expected = torch.tensor([[[0.5, EPS]]]).log()
    torch.testing.assert_close(z[..., :2], expected)
    assert z[0, 0, 2] == MASKED_SCORE


def test_the_others_lose_in_proportion_to_their_gap():
    """Eq. 21."""
    z = torch.tensor([[[-5.0, -1.0, -3.0, -9.0, -2.0]]])
    assert soft_nms(z, 0.5, 1).flatten().tolist() == [-7.0, -1.0, -4.0, -12.5, -2.0]


def test_the_neighborhood_ends_at_the_radius():
    """Eq. 20."""
    z = torch.tensor([[[-1.0, -5.0, -5.0, -5.0]]])
    assert soft_nms(z, 1.0, 2).flatten().tolist() == [-1.0, -9.0, -9.0, -5.0]


def test_masked_positions_do_not_suppress_their_neighbors():
    z = torch.full((1, 1, 5), MASKED_SCORE)
    z[..., 2] = -7.0
    assert soft_nms(z, 0.5, 2)[0, 0, 2] == -7.0


def test_masked_positions_stay_masked_and_finite():
    z = torch.randn(B, H, T)
    z[..., :20] = MASKED_SCORE
    z_nms = soft_nms(z, 1.0, 16)
    assert (z_nms[..., :20] <= MASKED_SCORE).all()
    assert z_nms.isfinite().all()


def test_a_negative_radius_is_refused():
    with pytest.raises(ValueError, match=r"^radius must be at least 0, got -1$"):
        soft_nms(torch.zeros(B, H, T), 0.5, -1)


def test_exclusivity_lowers_each_score_by_the_log_of_its_responsibility():
    """Eqs. 22-23."""
    z = torch.randn(B, H, T)
    expected = z + 0.35 * (z / 2.0).log_softmax(1)
    torch.testing.assert_close(exclude_across_heads(z, 0.35, 2.0), expected)


def test_one_head_has_nobody_to_compete_with_and_strength_zero_changes_nothing():
    z = torch.randn(B, H, T)
    assert torch.equal(exclude_across_heads(z[:, :1], 0.35, 1.0), z[:, :1])
    assert torch.equal(exclude_across_heads(z, 0.0, 1.0), z)
    assert torch.equal(soft_nms(z, 0.0, 16), z)


def test_responsibility_is_bounded_from_below():
    """Eq. 23's max(r, eps)."""
    z = torch.tensor([0.0, -1000.0]).view(1, 2, 1)
    expected = -1000.0 + torch.tensor(EPS).log().item()
    assert exclude_across_heads(z, 1.0, 1.0)[0, 1, 0].item() == pytest.approx(expected)


def test_a_low_temperature_keeps_masked_scores_finite():
    z = torch.full((B, H, T), MASKED_SCORE)
    assert exclude_across_heads(z, 0.35, 1e-9).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_refinements_of_half_precision_are_float32(dtype: torch.dtype):
    score = torch.rand(B, H, T).to(dtype)
    everywhere = torch.ones(B, T, dtype=torch.bool)
    assert torch.equal(log_score(score, everywhere), log_score(score.float(), everywhere))
    assert torch.equal(soft_nms(score, 0.5, 2), soft_nms(score.float(), 0.5, 2))
    actual, expected = (exclude_across_heads(z, 0.3, 1.0) for z in (score, score.float()))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("radius", "length"), [(0, 64), (1, 64), (3, 64), (4, 64), (63, 64), (200, 64), (16, 1)])
def test_the_peak_of_a_neighborhood_is_what_pooling_finds(radius: int, length: int):
    score = torch.randn(3, length).masked_fill(torch.rand(3, length) < 0.2, -torch.inf)
    peak = neighborhood_peak(score, radius)
    for position in range(length):
        near = score[:, max(0, position - radius) : position + radius + 1]
        assert torch.equal(peak[:, position], near.amax(-1))
