"""Log-score refinements, Eqs. 19-23, and scores of whole pages."""

import math
from collections.abc import Callable

import torch
from torch.nn.functional import pad

from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.selector.fusion import check_not_negative, masked, neighborhood_peak, widened
from sfi_kernels.shapes import check_shape


def log_score(score_BHT: torch.Tensor, allowed_BT: torch.Tensor | None) -> torch.Tensor:
    """Take the logarithm, z [B, H, T], `MASKED_SCORE` outside J; None allows everything (Eq. 19)."""
    allowed_B1T = None if allowed_BT is None else allowed_BT[:, None]
    return masked((widened(score_BHT) + EPS).log(), allowed_B1T, MASKED_SCORE)


def soft_nms(score_BHT: torch.Tensor, alpha_soft: float, radius: int) -> torch.Tensor:
    """Lower each score by its gap to the best score nearby (Eqs. 20-21).

    `alpha_soft` >= 0 is the strength of the decay; `radius` is the half-width of the neighborhood N(j), in tokens.
    Paper gap: the radius is not given. z_nms is `MASKED_SCORE` or lower outside J, where the scores are `MASKED_SCORE`.
    """
    check_not_negative(radius, "radius")
    score_BHT = widened(score_BHT)
    return score_BHT - alpha_soft * (neighborhood_peak(score_BHT, radius) - score_BHT)


def exclude_across_heads(
    score_BHT: torch.Tensor,
    alpha_cross: float,
    temperature: float,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Make KV heads compete for a position; z_adj, [B, H, T] (Eqs. 22-23).

    A single KV head keeps its scores, which are finite. `alpha_cross` >= 0 is the strength of the exclusivity, 0 none;
    `temperature` > 0 the paper's T, lower is sharper. Paper gap: not given. `gather` stacks the tensors of all
    processes that share the layer's heads; None where one has them all.
    """
    score_BHT = widened(score_BHT)
    if alpha_cross == 0:
        return score_BHT
    if gather is None:
        # softmax ignores the shift; without it a low temperature takes MASKED_SCORE to -inf
        lead_BHT = score_BHT - score_BHT.amax(1, keepdim=True)
        log_share_BHT = torch.log_softmax(lead_BHT / temperature, dim=1)
    else:  # the softmax over heads that lie elsewhere too, from each process' maximum and sum
        best_BT = score_BHT.amax(1)
        sum_BT = ((score_BHT - best_BT[:, None]) / temperature).exp().sum(1)
        best_RBT, sum_RBT = gather(torch.stack([best_BT, sum_BT])).unbind(1)
        best_BT = best_RBT.amax(0)
        total_BT = (sum_RBT * ((best_RBT - best_BT) / temperature).exp()).sum(0)
        log_share_BHT = (((score_BHT - best_BT[:, None]) / temperature).exp() / total_BT[:, None]).log()
    return score_BHT + alpha_cross * log_share_BHT.clamp_min(math.log(EPS))


def pool_by_page(score_BHT: torch.Tensor, page_size: int) -> torch.Tensor:
    """Give every position of J the score of its page: the logarithm of the mean of its tokens' scores.

    Pages begin at position 0, as the blocks of a paged cache do; `page_size` need not divide T. `top_k` of the result
    takes whole pages, the one with the higher score first, the lower page at a tie; of a page at an edge of J only the
    positions in J, and of the last page the first ones, as many as the budget has left. Scores, z_adj, are at or below
    `MASKED_SCORE / 2` outside J. The host never waits for a device.

    Paper gap: the paper selects single tokens. The mean was chosen over the best score and the mean log score
    (docs/evidence/granularity.md).
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
