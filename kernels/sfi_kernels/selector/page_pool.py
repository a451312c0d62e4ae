"""Scores of whole pages, so that Top-K takes pages instead of single tokens."""

import torch
from torch.nn.functional import pad

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.selector.numerics import widened
from sfi_kernels.shapes import check_shape


def pool_by_page(score_BHT: torch.Tensor, page_size: int) -> torch.Tensor:
    """Give every position of J the score of its page: the logarithm of the mean of its tokens' scores.

    Pages begin at position 0, as the blocks of a paged cache do. `top_k` of the result takes whole pages, the
    one with the higher score first, the lower page at a tie; of a page at an edge of J only the positions in
    J, and of the last page the first ones, as many as the budget has left. It takes as many positions as
    without pages. The host never waits for a device.

    Paper gap: the paper selects single tokens. The mean was chosen over the best score and the mean log score
    (docs/evidence/granularity.md).

    Args:
        score_BHT: Refined log scores z_adj, at or below `MASKED_SCORE / 2` outside J. Any float.
        page_size: Tokens of a page. At least 1, which changes nothing; need not divide T.

    Returns:
        [B, H, T], `MASKED_SCORE` outside J.

    Raises:
        ValueError: `page_size` is not positive, or the scores are not of rank 3.
    """
    check_shape(score_BHT, "score", B=None, H=None, T=None)
    if page_size < 1:
        raise ValueError(f"page_size must be positive, got {page_size}")
    B, H, T = score_BHT.shape
    outside_BHT = score_BHT <= MASKED_SCORE / 2
    score_BHT = widened(score_BHT).masked_fill(outside_BHT, MASKED_SCORE)
    whole_BHT = pad(score_BHT, (0, -T % page_size), value=MASKED_SCORE)
    page_BHPN = whole_BHT.reshape(B, H, -1, page_size)
    best_BHP1 = page_BHPN.amax(-1, keepdim=True)
    # in float64, so that the order of the sum does not show; a position outside J adds nothing
    sum_BHP1 = (page_BHPN - best_BHP1).exp().sum(-1, keepdim=True, dtype=torch.float64)
    count_BHP1 = (page_BHPN > MASKED_SCORE / 2).sum(-1, keepdim=True).clamp_min(1)
    mean_BHP1 = best_BHP1 + (sum_BHP1 / count_BHP1).log().to(best_BHP1.dtype)
    own_BHT = mean_BHP1.expand_as(page_BHPN).reshape(B, H, -1)[..., :T]
    return own_BHT.masked_fill(outside_BHT, MASKED_SCORE)
