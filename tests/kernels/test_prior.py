"""Eqs. 9-12: the cache-aware prior."""

import pytest
import torch

from sfi_kernels.selector import key_norm_factor, normalized_position, position_factor, prior

B, H, T = 2, 3, 50


@pytest.fixture
def allowed() -> torch.Tensor:
    mask_BT = torch.ones(B, T, dtype=torch.bool)
    mask_BT[0, :4] = False
    mask_BT[1, -10:] = False
    return mask_BT


def test_longer_keys_have_a_lower_factor():
    """Eq. 9."""
    factor = key_norm_factor(torch.tensor([[[1.0, 4.0, 9.0]]]), gamma=0.5)
    torch.testing.assert_close(factor, torch.tensor([[[1.0, 1 / 2, 1 / 3]]]))


def test_a_key_of_norm_zero_keeps_the_prior_finite():
    """Eq. 9: (0 + eps)^-gamma leaves float32 from gamma = 5 on."""
    factor = key_norm_factor(torch.tensor([[[0.0, 1.0]]]), gamma=6.0)
    r = prior(factor, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(r, torch.tensor([[[1.0, 0.0]]]))


def test_positions_span_the_unit_interval_of_each_request(allowed):
    """Eq. 10, on a different J per request."""
    u = normalized_position(allowed)
    assert (u[0, 4].item(), u[0, -1].item()) == (0.0, 1.0)
    assert (u[1, 0].item(), u[1, -11].item()) == (0.0, 1.0)
    assert (u[allowed].view(-1).diff()[: T - 5] > 0).all()


def test_a_single_allowed_position_is_at_zero():
    u = normalized_position(torch.arange(8)[None] == 5)
    assert u[0, 5] == 0.0


def test_no_allowed_position_gives_no_nan():
    u = normalized_position(torch.zeros(1, 8, dtype=torch.bool))
    assert ((u >= 0) & (u <= 1)).all()


def test_the_position_factor_is_the_product_of_decay_and_brake():
    """Eq. 11 at u = 1/2: exp(-beta / 2^p) * (1/2)^eta."""
    factor = position_factor(torch.tensor([[0.5]]), beta=2.0, power=3.0, eta=2.0)
    torch.testing.assert_close(factor, torch.tensor([[0.25]]) * torch.tensor(-0.25).exp())


def test_the_prior_is_proportional_to_both_factors():
    """Eq. 12."""
    norm_factor, place_factor = torch.tensor([[[1.0, 2.0, 1.0]]]), torch.tensor([[1.0, 1.0, 4.0]])
    r = prior(norm_factor, place_factor, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(r, torch.tensor([[[1 / 7, 2 / 7, 4 / 7]]]))


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_the_scale_of_the_factors_does_not_matter(allowed, scale):
    """Eqs. 9 and 11 say 'proportional to'."""
    factor, place = torch.rand(B, H, T), torch.rand(B, T)
    expected = prior(factor, place, allowed)
    torch.testing.assert_close(prior(factor * scale, place, allowed), expected)
