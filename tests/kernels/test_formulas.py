"""The Selector's formulas, Eqs. 6-23, and our `pool_neighbors`."""

import pytest
import torch

from sfi_kernels import selector as formulas
from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.selector.formulas import neighborhood_peak

B, H, G, W, T = 2, 3, 2, 4, 50
INF = float("inf")


@pytest.fixture
def allowed() -> torch.Tensor:
    mask_BT = torch.ones(B, T, dtype=torch.bool)
    mask_BT[0, :4] = False
    mask_BT[1, -10:] = False
    return mask_BT


def test_probability_is_the_softmax_restricted_to_the_allowed_set(allowed):
    """Eq. 6: logits outside J have no say."""
    logits = torch.randn(B, H, G, W, T)
    p = formulas.attention_probability(logits, allowed)
    torch.testing.assert_close(p[0, ..., 4:], logits[0, ..., 4:].softmax(-1))
    assert (p.masked_select(~allowed[:, None, None, None]) == 0).all()


def test_a_query_that_sees_nothing_does_not_change_the_evidence(allowed):
    """A window longer than what it can see is the window of the queries that see something."""
    logits = torch.randn(B, H, 1, W, T)
    logits[:, :, :, 0] = -INF
    f_all, f_seeing = (
        formulas.evidence(formulas.power_mean(formulas.attention_probability(rows, allowed), 0.5), 0.5)
        for rows in (logits, logits[:, :, :, 1:])
    )
    torch.testing.assert_close(f_all, f_seeing)


def test_one_query_makes_the_evidence_its_attention(allowed):
    """Below Eq. 7: with W = 1, Eq. 8 recovers f = p_1 exactly."""
    p = formulas.attention_probability(torch.randn(B, H, 1, 1, T), allowed)
    torch.testing.assert_close(formulas.evidence(formulas.power_mean(p, 0.5), 0.5), p[:, :, 0, 0])


def test_a_low_alpha_favors_what_many_queries_look_at():
    """Eq. 7: a little mass from both queries beats much mass from one of them."""
    p = torch.tensor([[0.8, 0.2], [0.0, 0.2]]).view(1, 1, 1, 2, 2)
    assert formulas.power_mean(p, 1.0).argmax() == 0
    assert formulas.power_mean(p, 0.3).argmax() == 1


@pytest.mark.parametrize("alpha", [0.02, 0.5, 1.0])
def test_evidence_sums_to_one_even_when_every_query_looks_elsewhere(alpha):
    """Eq. 8: mu^(1 / alpha) alone would underflow."""
    p = torch.eye(64).view(1, 1, 1, 64, 64)
    f = formulas.evidence(formulas.power_mean(p, alpha), alpha)
    torch.testing.assert_close(f, torch.full((1, 1, 64), 1 / 64))


def test_a_hit_brings_its_neighbors_within_the_span():
    logits = torch.zeros(1, 1, 1, 1, 7)
    logits[..., 3] = 5.0
    spread_out = formulas.pool_neighbors(logits, torch.ones(1, 7, dtype=torch.bool), 2)
    assert spread_out.flatten().tolist() == [0, 5, 5, 5, 5, 5, 0]


def test_positions_outside_the_allowed_set_neither_give_nor_receive():
    logits = torch.tensor([9.0, 0.0, 1.0, 0.0, -3.0]).view(1, 1, 1, 1, 5)
    allowed_BT = torch.tensor([[False, True, True, True, False]])
    assert formulas.pool_neighbors(logits, allowed_BT, 1).flatten().tolist() == [9, 1, 1, 1, -3]


def test_span_of_zero_returns_the_input_itself(allowed):
    logits = torch.randn(B, H, G, W, T)
    assert formulas.pool_neighbors(logits, allowed, 0) is logits


def test_spread_keeps_what_no_query_sees_masked(allowed):
    logits = torch.full((B, H, G, W, T), -INF, dtype=torch.float16)
    assert torch.equal(formulas.pool_neighbors(logits, allowed, 3), logits)


def test_longer_keys_have_a_lower_factor():
    """Eq. 9."""
    factor = formulas.key_norm_factor(torch.tensor([[[1.0, 4.0, 9.0]]]), gamma=0.5)
    torch.testing.assert_close(factor, torch.tensor([[[1.0, 1 / 2, 1 / 3]]]))


def test_a_key_of_norm_zero_keeps_the_prior_finite():
    """Eq. 9: (0 + eps)^-gamma leaves float32 from gamma = 5 on."""
    factor = formulas.key_norm_factor(torch.tensor([[[0.0, 1.0]]]), gamma=6.0)
    r = formulas.prior(factor, torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(r, torch.tensor([[[1.0, 0.0]]]))


def test_positions_span_the_unit_interval_of_each_request(allowed):
    """Eq. 10, on a different J per request."""
    u = formulas.normalized_position(allowed)
    assert (u[0, 4].item(), u[0, -1].item()) == (0.0, 1.0)
    assert (u[1, 0].item(), u[1, -11].item()) == (0.0, 1.0)
    assert (u[allowed].view(-1).diff()[: T - 5] > 0).all()


def test_a_single_allowed_position_is_at_zero():
    u = formulas.normalized_position(torch.arange(8)[None] == 5)
    assert u[0, 5] == 0.0


def test_no_allowed_position_gives_no_nan():
    u = formulas.normalized_position(torch.zeros(1, 8, dtype=torch.bool))
    assert ((u >= 0) & (u <= 1)).all()


def test_the_position_factor_is_the_product_of_decay_and_brake():
    """Eq. 11 at u = 1/2: exp(-beta / 2^p) * (1/2)^eta."""
    factor = formulas.position_factor(torch.tensor([[0.5]]), beta=2.0, power=3.0, eta=2.0)
    torch.testing.assert_close(factor, torch.tensor([[0.25]]) * torch.tensor(-0.25).exp())


def test_the_prior_is_proportional_to_both_factors():
    """Eq. 12."""
    norm_factor, place_factor = torch.tensor([[[1.0, 2.0, 1.0]]]), torch.tensor([[1.0, 1.0, 4.0]])
    r = formulas.prior(norm_factor, place_factor, torch.ones(1, 3, dtype=torch.bool))
    torch.testing.assert_close(r, torch.tensor([[[1 / 7, 2 / 7, 4 / 7]]]))


@pytest.mark.parametrize("scale", [1e-20, 1e20])
def test_the_scale_of_the_factors_does_not_matter(allowed, scale):
    """Eqs. 9 and 11 say 'proportional to'."""
    factor, place = torch.rand(B, H, T), torch.rand(B, T)
    expected = formulas.prior(factor, place, allowed)
    torch.testing.assert_close(formulas.prior(factor * scale, place, allowed), expected)


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
    s = formulas.fuse(f, r, weight_BH)

    def objective(x: torch.Tensor) -> torch.Tensor:
        return (1 - weight) * kl(f, x) + weight * kl(r, x)

    for seed in range(2, 12):
        other = torch.lerp(s, distribution(seed), 0.01)
        assert (objective(s) <= objective(other) + 1e-12).all()


def test_arithmetic_mixture_dominates_the_geometric_one():
    """Eq. 16."""
    f, r = distribution(0), distribution(1)
    weight_BH = torch.full((B, H), 0.3, dtype=f.dtype)
    assert (formulas.fuse(f, r, weight_BH) >= f**0.7 * r**0.3 - 1e-15).all()


def test_stable_weight_minimises_the_squared_norm():
    """Eqs. 17-18, by a grid over [0, lambda_clip]."""
    f, r = distribution(0), distribution(1)
    best = formulas.stable_weight(f, r, lambda_clip=1.0)
    grid = torch.linspace(0, 1, 1001, dtype=f.dtype)
    norms = torch.stack(
        [formulas.fuse(f, r, torch.full((B, H), w, dtype=f.dtype)).square().sum(-1) for w in grid.tolist()]
    )
    assert torch.allclose(grid[norms.argmin(0)], best, atol=1e-3)


def test_stable_weight_is_the_papers_quotient():
    """Eq. 18, its denominator written out."""
    f, r = distribution(0), distribution(1)
    dot = (f * r).sum(-1)
    quotient = (f.square().sum(-1) - dot) / (f.square().sum(-1) - 2 * dot + r.square().sum(-1))
    torch.testing.assert_close(formulas.stable_weight(f, r, 1.0), quotient.clamp(0, 1))


def test_stable_weight_is_zero_where_the_prior_would_only_sharpen():
    """Eqs. 17-18: f r > |f|^2 makes the quotient negative."""
    f, r = torch.tensor([[[0.4, 0.3, 0.3]]]), torch.tensor([[[0.9, 0.05, 0.05]]])
    assert formulas.stable_weight(f, r, 1.0).item() == 0


def test_distributions_equal_up_to_rounding_have_weight_zero():
    """Eq. 18 would divide noise by noise, and every device would find another weight."""
    f = distribution(0, torch.float32)
    r = f * (1 + torch.finfo(f.dtype).eps * torch.randint(-2, 3, (B, H, T)))
    assert not torch.equal(f, r)
    assert (formulas.stable_weight(f, r, 1.0) == 0).all()


def test_close_distributions_still_have_their_weight():
    """Above rounding Eq. 18 holds; float32 finds what float64 does."""
    f = distribution(0)
    r = torch.lerp(f, distribution(1), 1e-4)
    expected = formulas.stable_weight(f, r, 1.0)
    assert (expected > 0).any()
    actual = formulas.stable_weight(f.float(), r.float(), 1.0).double()
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_fused_in_float32(dtype: torch.dtype):
    f, r = distribution(0).to(dtype), distribution(1).to(dtype)
    weight_BH = formulas.stable_weight(f, r, 1.0)
    expected = formulas.stable_weight(f.float(), r.float(), 1.0)
    torch.testing.assert_close(weight_BH, expected)
    torch.testing.assert_close(
        formulas.fuse(f, r, weight_BH), formulas.fuse(f.float(), r.float(), expected), rtol=0, atol=0
    )


def test_log_score_is_the_log_inside_and_masked_outside():
    """Eq. 19."""
    z = formulas.log_score(torch.tensor([[[0.5, 0.0, 0.5]]]), torch.tensor([[True, True, False]]))
    expected = torch.tensor([[[0.5, EPS]]]).log()
    torch.testing.assert_close(z[..., :2], expected)
    assert z[0, 0, 2] == MASKED_SCORE


def test_the_others_lose_in_proportion_to_their_gap():
    """Eq. 21."""
    z = torch.tensor([[[-5.0, -1.0, -3.0, -9.0, -2.0]]])
    assert formulas.soft_nms(z, 0.5, 1).flatten().tolist() == [-7.0, -1.0, -4.0, -12.5, -2.0]


def test_the_neighborhood_ends_at_the_radius():
    """Eq. 20."""
    z = torch.tensor([[[-1.0, -5.0, -5.0, -5.0]]])
    assert formulas.soft_nms(z, 1.0, 2).flatten().tolist() == [-1.0, -9.0, -9.0, -5.0]


def test_masked_positions_do_not_suppress_their_neighbors():
    z = torch.full((1, 1, 5), MASKED_SCORE)
    z[..., 2] = -7.0
    assert formulas.soft_nms(z, 0.5, 2)[0, 0, 2] == -7.0


def test_masked_positions_stay_masked_and_finite():
    z = torch.randn(B, H, T)
    z[..., :20] = MASKED_SCORE
    z_nms = formulas.soft_nms(z, 1.0, 16)
    assert (z_nms[..., :20] <= MASKED_SCORE).all()
    assert z_nms.isfinite().all()


def test_exclusivity_lowers_each_score_by_the_log_of_its_responsibility():
    """Eqs. 22-23."""
    z = torch.randn(B, H, T)
    expected = z + 0.35 * (z / 2.0).log_softmax(1)
    torch.testing.assert_close(formulas.exclude_across_heads(z, 0.35, 2.0), expected)


def test_one_head_has_nobody_to_compete_with_and_strength_zero_changes_nothing():
    z = torch.randn(B, H, T)
    assert torch.equal(formulas.exclude_across_heads(z[:, :1], 0.35, 1.0), z[:, :1])
    assert torch.equal(formulas.exclude_across_heads(z, 0.0, 1.0), z)
    assert torch.equal(formulas.soft_nms(z, 0.0, 16), z)


def test_responsibility_is_bounded_from_below():
    """Eq. 23's max(r, eps)."""
    z = torch.tensor([0.0, -1000.0]).view(1, 2, 1)
    expected = -1000.0 + torch.tensor(EPS).log().item()
    assert formulas.exclude_across_heads(z, 1.0, 1.0)[0, 1, 0].item() == pytest.approx(expected)


def test_a_low_temperature_keeps_masked_scores_finite():
    z = torch.full((B, H, T), MASKED_SCORE)
    assert formulas.exclude_across_heads(z, 0.35, 1e-9).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_refinements_of_half_precision_are_float32(dtype: torch.dtype):
    score = torch.rand(B, H, T).to(dtype)
    everywhere = torch.ones(B, T, dtype=torch.bool)
    assert torch.equal(formulas.log_score(score, everywhere), formulas.log_score(score.float(), everywhere))
    assert torch.equal(formulas.soft_nms(score, 0.5, 2), formulas.soft_nms(score.float(), 0.5, 2))
    actual, expected = (formulas.exclude_across_heads(z, 0.3, 1.0) for z in (score, score.float()))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(("radius", "length"), [(0, 64), (1, 64), (3, 64), (4, 64), (63, 64), (200, 64), (16, 1)])
def test_the_peak_of_a_neighborhood_is_what_pooling_finds(radius: int, length: int):
    score = torch.randn(3, length).masked_fill(torch.rand(3, length) < 0.2, -torch.inf)
    peak = neighborhood_peak(score, radius)
    for position in range(length):
        near = score[:, max(0, position - radius) : position + radius + 1]
        assert torch.equal(peak[:, position], near.amax(-1))
