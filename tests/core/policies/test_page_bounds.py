"""Choosing by pages: the same positions as Top-K over single ones."""

import pytest
import torch

from sfi_core.policies.page_bounds import best_pages
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.top_k import top_k


@pytest.mark.parametrize("tied", [False, True])
def test_the_best_pages_are_the_best_positions(*, tied: bool):
    """Pages that J cuts at either end, budgets that cut a page, and empty candidate sets."""
    generator = torch.Generator().manual_seed(5)

    def below(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    for _ in range(300):
        page, T, budget = 1 + below(8), 1 + below(60), 1 + below(40)
        first, stop = sorted((below(T + 1), below(T + 1)))
        score_HP = torch.rand(3, -(-T // page), generator=generator)
        if tied:
            score_HP = (4 * score_HP).floor()
        position_T = torch.arange(T)
        outside = (position_T < first) | (position_T >= stop)
        score_HT = score_HP.repeat_interleave(page, 1)[:, :T].masked_fill(outside, MASKED_SCORE)
        expected = top_k(score_HT[None], budget)[0, :, : stop - first]
        assert torch.equal(best_pages(score_HP, page, (first, stop), budget), expected)
