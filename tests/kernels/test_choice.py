"""Choosing the likeliest keys: the reference against the rule, and numba against the reference."""

import math

import pytest
import torch

from sfi_kernels.key_codes import choose_likeliest
from tests.fakes import coarse

REST = 0.3


@pytest.fixture(params=["torch", "numba"])
def choose(request: pytest.FixtureRequest):
    if request.param == "numba":
        pytest.importorskip("numba")
    return choose_likeliest.on(request.param)


def assert_chosen(choose, logits_HGT: torch.Tensor, budget: int) -> None:
    """Compare with a sort of the 8 bits of a score, in which the lower position wins a tie."""
    weight_HGT = logits_HGT.double().softmax(-1)
    index_HK, unread_HG = choose(logits_HGT.clone(), budget, rest=REST)
    assert index_HK.dtype == torch.int32
    score_HT = coarse(weight_HGT.mean(1))
    for head, score_T in enumerate(score_HT):
        best = sorted(score_T.sort(descending=True, stable=True).indices[:budget].tolist())
        assert index_HK[head].tolist() == best
        others = [t for t in range(len(score_T)) if t not in best]
        expected_G = logits_HGT[head, :, others].double().logsumexp(-1) + math.log(REST)
        # the sum of the others is 1 minus that of the chosen, in float32
        atol_G = 1e-6 * REST * logits_HGT[head].double().exp().sum(-1)
        off_G = (unread_HG[head].double().exp() - expected_G.exp()).abs()
        assert (off_G <= atol_G).all()


@pytest.mark.parametrize(("H", "G", "T", "K"), [(2, 1, 2, 1), (3, 2, 70, 69), (1, 3, 700, 37), (2, 8, 999, 400)])
def test_the_likeliest_are_chosen_and_the_others_weighed(choose, H: int, G: int, T: int, K: int):
    assert_chosen(choose, torch.randn(H, G, T) * 2, K)


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_a_tie_goes_to_the_lower_position(choose, levels: int):
    level_T = torch.randint(levels, (300,)).float()
    assert_chosen(choose, level_T.expand(2, 3, -1).contiguous(), 100)


def test_one_key_may_have_all_the_weight(choose):
    """The other weights are too small for float32, so that the lowest positions fill the budget."""
    logits = torch.full((1, 2, 50), -300.0)
    logits[:, :, 30] = 0.0
    index_HK, unread_HG = choose(logits, 4, rest=REST)
    assert index_HK.tolist() == [[0, 1, 2, 30]]
    assert (unread_HG == -torch.inf).all()


def test_nothing_of_the_rest_counts_with_a_factor_of_zero(choose):
    assert (choose(torch.randn(1, 2, 50), 4, rest=0.0)[1] == -torch.inf).all()


def test_a_budget_leaves_something_to_choose(choose):
    with pytest.raises(ValueError, match=r"^budget must be within 1 and 9, got 10$"):
        choose(torch.randn(1, 2, 10), 10, rest=REST)
