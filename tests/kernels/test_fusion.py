"""Eqs. 13-18: the fused score and the weight of the prior."""

import pytest
import torch

from sfi_kernels.selector.formulas import fuse, stable_weight

B, H, T = 2, 3, 41


def distribution(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(3 * torch.randn(B, H, T, generator=generator, dtype=dtype), -1)


def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * (a / b).log()).sum(-1)


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_fuse_minimises_the_reverse_kl_objective(weight: float):
    """Eqs. 13-15: no nearby distribution has a lower objective."""
    f, r = distribution(0), distribution(1)
    weight_BH = torch.full((B, H), weight, dtype=f.dtype)
    s = fuse(f, r, weight_BH)

    def objective(x: torch.Tensor) -> torch.Tensor:
        return (1 - weight) * kl(f, x) + weight * kl(r, x)

    for seed in range(2, 12):
        other = torch.lerp(s, distribution(seed), 0.01)
        assert (objective(s) <= objective(other) + 1e-12).all()


def test_arithmetic_mixture_dominates_the_geometric_one():
    """Eq. 16."""
    f, r = distribution(0), distribution(1)
    weight_BH = torch.full((B, H), 0.3, dtype=f.dtype)
    assert (fuse(f, r, weight_BH) >= f**0.7 * r**0.3 - 1e-15).all()


def test_stable_weight_minimises_the_squared_norm():
    """Eqs. 17-18, by a grid over [0, lambda_clip]."""
    f, r = distribution(0), distribution(1)
    best = stable_weight(f, r, lambda_clip=1.0)
    grid = torch.linspace(0, 1, 1001, dtype=f.dtype)
    norms = torch.stack([fuse(f, r, torch.full((B, H), w, dtype=f.dtype)).square().sum(-1) for w in grid.tolist()])
    assert torch.allclose(grid[norms.argmin(0)], best, atol=1e-3)


def test_stable_weight_is_the_papers_quotient():
    """Eq. 18, its denominator written out."""
    f, r = distribution(0), distribution(1)
    dot = (f * r).sum(-1)
    quotient = (f.square().sum(-1) - dot) / (f.square().sum(-1) - 2 * dot + r.square().sum(-1))
    torch.testing.assert_close(stable_weight(f, r, 1.0), quotient.clamp(0, 1))


def test_stable_weight_is_zero_where_the_prior_would_only_sharpen():
    """Eqs. 17-18: f r > |f|^2 makes the quotient negative."""
    f, r = torch.tensor([[[0.4, 0.3, 0.3]]]), torch.tensor([[[0.9, 0.05, 0.05]]])
    assert stable_weight(f, r, 1.0).item() == 0


def test_distributions_equal_up_to_rounding_have_weight_zero():
    """Eq. 18 would divide noise by noise, and every device would find another weight."""
    f = distribution(0, torch.float32)
    r = f * (1 + torch.finfo(f.dtype).eps * torch.randint(-2, 3, (B, H, T)))
    assert not torch.equal(f, r)
    assert (stable_weight(f, r, 1.0) == 0).all()


def test_close_distributions_still_have_their_weight():
    """Above rounding Eq. 18 holds; float32 finds what float64 does."""
    f = distribution(0)
    r = torch.lerp(f, distribution(1), 1e-4)
    expected = stable_weight(f, r, 1.0)
    assert (expected > 0).any()
    actual = stable_weight(f.float(), r.float(), 1.0).double()
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_fused_in_float32(dtype: torch.dtype):
    f, r = distribution(0).to(dtype), distribution(1).to(dtype)
    weight_BH = stable_weight(f, r, 1.0)
    expected = stable_weight(f.float(), r.float(), 1.0)
    torch.testing.assert_close(weight_BH, expected)
    torch.testing.assert_close(fuse(f, r, weight_BH), fuse(f.float(), r.float(), expected), rtol=0, atol=0)
