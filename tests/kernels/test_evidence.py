"""Eqs. 6-8, and our `pool_neighbors`."""

import pytest
import torch

from sfi_kernels.selector import attention_probability, evidence, pool_neighbors, power_mean

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
    p = attention_probability(logits, allowed)
    torch.testing.assert_close(p[0, ..., 4:], logits[0, ..., 4:].softmax(-1))
    assert (p.masked_select(~allowed[:, None, None, None]) == 0).all()


def test_a_query_that_sees_nothing_does_not_change_the_evidence(allowed):
    """A window longer than what it can see is the window of the queries that see something."""
    logits = torch.randn(B, H, 1, W, T)
    logits[:, :, :, 0] = -INF
    f_all, f_seeing = (
        evidence(power_mean(attention_probability(rows, allowed), 0.5), 0.5) for rows in (logits, logits[:, :, :, 1:])
    )
    torch.testing.assert_close(f_all, f_seeing)


def test_one_query_makes_the_evidence_its_attention(allowed):
    """Below Eq. 7: with W = 1, Eq. 8 recovers f = p_1 exactly."""
    p = attention_probability(torch.randn(B, H, 1, 1, T), allowed)
    torch.testing.assert_close(evidence(power_mean(p, 0.5), 0.5), p[:, :, 0, 0])


def test_a_low_alpha_favors_what_many_queries_look_at():
    """Eq. 7: a little mass from both queries beats much mass from one of them."""
    p = torch.tensor([[0.8, 0.2], [0.0, 0.2]]).view(1, 1, 1, 2, 2)
    assert power_mean(p, 1.0).argmax() == 0
    assert power_mean(p, 0.3).argmax() == 1


@pytest.mark.parametrize("alpha", [0.02, 0.5, 1.0])
def test_evidence_sums_to_one_even_when_every_query_looks_elsewhere(alpha):
    """Eq. 8: mu^(1 / alpha) alone would underflow."""
    p = torch.eye(64).view(1, 1, 1, 64, 64)
    f = evidence(power_mean(p, alpha), alpha)
    torch.testing.assert_close(f, torch.full((1, 1, 64), 1 / 64))


def test_a_hit_brings_its_neighbors_within_the_span():
    logits = torch.zeros(1, 1, 1, 1, 7)
    logits[..., 3] = 5.0
    spread_out = pool_neighbors(logits, torch.ones(1, 7, dtype=torch.bool), 2)
    assert spread_out.flatten().tolist() == [0, 5, 5, 5, 5, 5, 0]


def test_positions_outside_the_allowed_set_neither_give_nor_receive():
    logits = torch.tensor([9.0, 0.0, 1.0, 0.0, -3.0]).view(1, 1, 1, 1, 5)
    allowed_BT = torch.tensor([[False, True, True, True, False]])
    assert pool_neighbors(logits, allowed_BT, 1).flatten().tolist() == [9, 1, 1, 1, -3]


def test_span_of_zero_returns_the_input_itself(allowed):
    logits = torch.randn(B, H, G, W, T)
    assert pool_neighbors(logits, allowed, 0) is logits


def test_spread_keeps_what_no_query_sees_masked(allowed):
    logits = torch.full((B, H, G, W, T), -INF, dtype=torch.float16)
    assert torch.equal(pool_neighbors(logits, allowed, 3), logits)


def test_a_negative_span_is_refused(allowed):
    with pytest.raises(ValueError, match=r"^span must be at least 0, got -1$"):
        pool_neighbors(torch.zeros(B, H, G, W, T), allowed, -1)
