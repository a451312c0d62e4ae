"""Page granularity: Top-K of the scores that `pool_by_page` makes takes whole pages."""

import math

import pytest
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.selector import pool_by_page
from sfi_kernels.top_k import top_k
from tests.fakes import kernel_device

FIRST, STOP, T = 5, 83, 90  # J and the length: neither begins nor ends with a page


def scores(*, ties: bool) -> torch.Tensor:
    """Return scores of two requests and three heads, a rounding of a normal where many are to be equal."""
    score_BHT = torch.randn(2, 3, T, generator=torch.Generator().manual_seed(0)) * 2
    score_BHT = score_BHT.round() if ties else score_BHT
    score_BHT[..., :FIRST] = 1.5 * MASKED_SCORE  # Soft-NMS leaves less than the mask
    score_BHT[0, :, STOP:] = MASKED_SCORE
    score_BHT[1, :, STOP - 40 :] = MASKED_SCORE
    return score_BHT


def by_hand(score_T: list[float], page_size: int, budget: int) -> list[int]:
    """Take pages, best mean first, as sets; the last one from the front as far as the budget goes."""
    pages: dict[int, set[int]] = {}
    for position, score in enumerate(score_T):
        if score > MASKED_SCORE / 2:
            pages.setdefault(position // page_size, set()).add(position)
    mean = {
        page: math.fsum(math.exp(score_T[position]) for position in sorted(own)) / len(own)
        for page, own in pages.items()
    }
    chosen: set[int] = set()
    for page in sorted(pages, key=lambda page: (-mean[page], page)):
        room = budget - len(chosen)
        chosen |= set(sorted(pages[page])[:room])
    return sorted(chosen)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("page_size", "budget"), [(1, 20), (4, 1), (7, 20), (7, T), (16, 48), (128, 20)])
def test_top_k_takes_whole_pages(backend: str, page_size: int, budget: int):
    """Loops and sets say the same, with ties and without."""
    if backend == "triton":
        pytest.importorskip("triton")
    device = kernel_device(backend)
    for score_BHT in (scores(ties=False), scores(ties=True)):
        pooled_BHT = pool_by_page(score_BHT.to(device), page_size)
        index_BHK = top_k.on(backend)(pooled_BHT, budget).cpu()
        for score_HT, index_HK in zip(score_BHT.tolist(), index_BHK.tolist(), strict=True):
            for score_T, index_K in zip(score_HT, index_HK, strict=True):
                expected = by_hand(score_T, page_size, budget)
                assert index_K == expected + [-1] * (len(index_K) - len(expected))


def test_pages_of_one_token_change_nothing_within_j():
    score_BHT = scores(ties=False)
    inside_BHT = score_BHT > MASKED_SCORE / 2
    pooled_BHT = pool_by_page(score_BHT, 1)
    assert torch.equal(pooled_BHT[inside_BHT], score_BHT[inside_BHT])
    assert (pooled_BHT[~inside_BHT] == MASKED_SCORE).all()


def test_a_page_has_a_token():
    with pytest.raises(ValueError, match=r"^page_size must be positive, got 0$"):
        pool_by_page(scores(ties=False), 0)
