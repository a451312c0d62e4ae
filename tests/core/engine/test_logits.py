"""How far next-token distributions are from each other."""

import math

import pytest
import torch

from sfi_core.engine.audit import compare_logits, divergence


def test_the_divergence_of_two_coins():
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.9, 0.1]).log()
    by_hand = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(p, q) == pytest.approx(by_hand, rel=1e-6)
    assert divergence(p, p) == 0
    never = torch.tensor([1.0, 0.0]).log()
    assert divergence(never, p) == pytest.approx(math.log(2))
    assert divergence(p, never) == math.inf
    assert divergence(p, q * math.nan).isnan()


def test_no_divergence_is_negative():
    """Distributions that differ by roundings: the terms of their divergence cancel."""
    dense_RV = 3 * torch.randn(256, 96)
    ours_RV = dense_RV + 1e-6 * torch.randn(256, 96)
    found = compare_logits(ours_RV, dense_RV)
    assert found["kl_R"].min() == 0
    assert found["kl_R"].max() < 1e-5
    assert found["agrees_R"].all()
