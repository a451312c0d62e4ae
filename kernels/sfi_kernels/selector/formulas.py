"""The Selector's formulas: evidence, Eqs. 6-8, prior, Eqs. 9-12, reverse-KL fusion, Eqs. 15-18, refinement, Eqs. 19-23.

Eqs. 13, 14 and 16 are the derivation; `tests/kernels/test_formulas.py` checks them. `allowed_BT` is the candidate set
J, None for every position. Half precision is computed in float32.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.op import check_shapes

Gather = Callable[[torch.Tensor], torch.Tensor]  # stacks the tensors of all processes that share a layer's heads


def check_not_negative(value: int, name: str) -> None:
    """Raise `ValueError` if a count is below 0."""
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Convert half precision to float32; float32 and float64 stay as they are."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def masked(tensor: torch.Tensor, allowed: torch.Tensor | None, value: float) -> torch.Tensor:
    """Put `value` where the broadcast `allowed` is False; None allows everything."""
    return tensor if allowed is None else tensor.masked_fill(~allowed, value)


def distribution(weight_BHT: torch.Tensor, power: float = 1.0) -> torch.Tensor:
    """Scale powers of nonnegative weights to sum to 1 over T; a row of zeros stays 0.

    Dividing by the peak first keeps rows of very small or large weights exact, and their powers from underflow; an
    epsilon in the denominator would not.
    """
    peak_BH1 = weight_BHT.amax(-1, keepdim=True)
    relative_BHT = (weight_BHT / peak_BH1.masked_fill(peak_BH1 == 0, 1.0)).pow(power)
    return relative_BHT / relative_BHT.sum(-1, keepdim=True).clamp_min(1.0)


def neighborhood_peak(tensor: torch.Tensor, radius: int) -> torch.Tensor:
    """Take the maximum over `radius` positions on each side, along the last dimension."""
    peak: Any = pad(tensor, (radius, radius), value=-torch.inf)
    maximum: Callable[[Any, Any], Any] = torch.maximum
    if numpy := by_numpy(tensor):
        peak, maximum = peak.detach().numpy(), np.maximum
    # windows that double, each the maximum of two: pooling takes as many comparisons as a window is wide
    reached, window = 1, 2 * radius + 1
    while reached < window:
        step = min(reached, window - reached)
        peak = maximum(peak[..., :-step], peak[..., step:])
        reached += step
    result: torch.Tensor = torch.from_numpy(peak) if numpy else peak
    return result


def by_numpy(tensor: torch.Tensor) -> bool:
    """Say whether numpy takes maxima: three times as fast as PyTorch for rows of some thousand numbers."""
    return tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16


def pool_neighbors(logits_BHGWT: torch.Tensor, allowed_BT: torch.Tensor | None, span: int) -> torch.Tensor:
    """Give each allowed position the best logit of `span` positions on each side, so that a hit brings its neighbors.

    An extension of ours, not in the paper. Pooling logits pools each query's evidence, up to its normalization, since
    the softmax is monotone. Positions outside J keep their logits and give none; a `span` of 0 changes nothing, a
    negative one raises `ValueError`.
    """
    check_not_negative(span, "span")
    if span == 0:
        return logits_BHGWT
    inside = None if allowed_BT is None else allowed_BT[:, None, None, None, :]
    given_BHGWT = masked(logits_BHGWT, inside, -torch.inf)
    pooled_BHGWT = neighborhood_peak(given_BHGWT.flatten(0, 2), span).view_as(logits_BHGWT)
    return pooled_BHGWT if inside is None else torch.where(inside, pooled_BHGWT, logits_BHGWT)


def attention_probability(
    logits_BHGWT: torch.Tensor, allowed_BT: torch.Tensor | None, log_sum_BHGW: torch.Tensor | None = None
) -> torch.Tensor:
    """Turn each query's logits into a distribution on the allowed set (Eq. 6).

    The scaled logits are -inf where a query may not look, never NaN or +inf; `log_sum_BHGW` is their log-sum-exp over
    J, where it is known already. p, [B, H, G, W, T], is 0 outside J, and each row sums to 1, or is zeros where a query
    sees nothing of J.
    """
    inside = None if allowed_BT is None else allowed_BT[:, None, None, None, :]
    inside_BHGWT = masked(widened(logits_BHGWT), inside, -torch.inf)
    p_BHGWT = inside_BHGWT.softmax(-1) if log_sum_BHGW is None else (inside_BHGWT - log_sum_BHGW[..., None]).exp()
    return p_BHGWT.nan_to_num(0.0)  # NaN where a query sees nothing


def power_mean(probability_BHGWT: torch.Tensor, alpha: float) -> torch.Tensor:
    """Average the window in the domain of powers `alpha`, in (0, 1]; mu, [B, H, T], not normalized (Eq. 7).

    Paper gap: Eq. 7 is per KV head and does not say how its G query heads share it. As in the released code,
    the mean is over G heads and W queries alike.
    """
    return widened(probability_BHGWT).pow(alpha).mean(dim=(2, 3))


def evidence(mean_BHT: torch.Tensor, alpha: float) -> torch.Tensor:
    """Map the power mean back and normalize it (Eq. 8).

    Each row of f, [B, H, T], sums to 1. With one query per KV head it is Eq. 6's p; a row without any evidence is 0.
    """
    return distribution(widened(mean_BHT), 1.0 / alpha)


def key_norm_factor(key_norm_BHT: torch.Tensor, gamma: float) -> torch.Tensor:
    """Penalize unusually long keys; pi_kn, [B, H, T], not normalized, finite even for a key of norm 0 (Eq. 9).

    `gamma` >= 0 is the strength of the penalty. Paper gap: not given.
    """
    factor_BHT = (widened(key_norm_BHT) + EPS).pow(-gamma)
    return factor_BHT.clamp_max(torch.finfo(torch.float32).max)


def normalized_position(allowed_BT: torch.Tensor) -> torch.Tensor:
    """Place the allowed positions on [0, 1], oldest first (Eq. 10).

    u, [B, T] float32, is 0 for a single allowed position, meaningless but in [0, 1] outside J.
    """
    T = allowed_BT.shape[-1]
    position_T = torch.arange(T, device=allowed_BT.device, dtype=torch.float32)
    # T and -1 keep u finite for a request that allows nothing
    first_B1 = position_T.masked_fill(~allowed_BT, T).amin(-1, keepdim=True)
    last_B1 = position_T.masked_fill(~allowed_BT, -1.0).amax(-1, keepdim=True)
    return ((position_T - first_B1) / (last_B1 - first_B1 + EPS)).clamp(0.0, 1.0)


def position_factor(position_BT: torch.Tensor, beta: float, power: float, eta: float) -> torch.Tensor:
    """Discount recency globally and brake at the tail; pi_pos, [B, T], not normalized, in [0, 1] (Eq. 11).

    `beta` >= 0 is the strength of the decay. Paper gap: not given.
    `power` >= 1 is its curvature p. Paper gap: not given.
    `eta` >= 0 is the strength of the brake. Paper gap: not given.
    """
    position_BT = widened(position_BT)
    decay_BT = torch.exp(-beta * position_BT.pow(power))
    return decay_BT * (1.0 - position_BT + EPS).pow(eta)


@lru_cache(maxsize=4)
def factor_everywhere(T: int, device: torch.device, *settings: float) -> torch.Tensor:
    """Return `position_factor` where all T positions are allowed, [1, T], cached; do not write to it.

    All layers of a step share the factor; at 4K tokens it takes a fifth of the Selector's time on a CPU.
    `settings` are `position_factor`'s, from `beta` on.
    """
    allowed_1T = torch.ones(1, T, dtype=torch.bool, device=device)
    return position_factor(normalized_position(allowed_1T), *settings)


def prior(
    key_norm_factor_BHT: torch.Tensor, position_factor_BT: torch.Tensor, allowed_BT: torch.Tensor | None
) -> torch.Tensor:
    """Multiply the two factors and normalize on the allowed set (Eq. 12).

    Each row of r, [B, H, T], sums to 1, 0 outside J whatever the factors hold there, and where nothing is allowed.
    """
    weight_BHT = widened(key_norm_factor_BHT) * widened(position_factor_BT)[:, None]
    return distribution(masked(weight_BHT, None if allowed_BT is None else allowed_BT[:, None], 0.0))


def fuse(evidence_BHT: torch.Tensor, prior_BHT: torch.Tensor, weight_BH: torch.Tensor) -> torch.Tensor:
    """Mix evidence f and prior r, the minimizer of the reverse-KL objective; s, [B, H, T] (Eq. 15).

    The rows of f, r and s sum to 1, on the same support; `weight_BH` is the prior's weight lambda, in [0, 1].
    """
    evidence_BHT = widened(evidence_BHT)
    weight_BH1 = weight_BH.to(evidence_BHT.dtype).unsqueeze(-1)
    return torch.lerp(evidence_BHT, prior_BHT.to(evidence_BHT.dtype), weight_BH1)


def stable_weight(evidence_BHT: torch.Tensor, prior_BHT: torch.Tensor, lambda_clip: float) -> torch.Tensor:
    """Find the prior's weight that makes the fused ranking most stable (Eqs. 17-18).

    The rows of evidence f and prior r sum to 1, on the same support. lambda*, [B, H], is in [0, lambda_clip], 0 where
    both are equal up to rounding.
    """
    evidence_BHT = widened(evidence_BHT)
    difference_BHT = evidence_BHT - prior_BHT
    # |f|^2 - 2 f.r + |r|^2 written as |f - r|^2, which cannot cancel to a negative number
    distance_BH = difference_BHT.square().sum(-1)
    gain_BH = (evidence_BHT * difference_BHT).sum(-1)
    # closer than the rounding of f and r, the quotient would be noise
    rounding_BH = (8 * torch.finfo(evidence_BHT.dtype).eps) ** 2 * evidence_BHT.square().sum(-1)
    weight_BH = torch.where(distance_BH > rounding_BH, gain_BH / distance_BH, 0.0)
    return weight_BH.clamp(0.0, lambda_clip)


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
    score_BHT: torch.Tensor, alpha_cross: float, temperature: float, gather: Gather | None = None
) -> torch.Tensor:
    """Make KV heads compete for a position; z_adj, [B, H, T] (Eqs. 22-23).

    A single KV head keeps its scores, which are finite. `alpha_cross` >= 0 is the strength of the exclusivity, 0 none;
    `temperature` > 0 the paper's T, lower is sharper. Paper gap: not given. `gather` is None where a process has all.
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

    Pages begin at position 0; `page_size` need not divide T. `top_k` of the result takes whole pages, the lower one at
    a tie; of a page at an edge of J only the positions in J, and of the last page the first ones, as many as the budget
    has left. Scores, z_adj, are at or below `MASKED_SCORE / 2` outside J. The host never waits for a device.

    Paper gap: the paper selects single tokens. The mean was chosen over the best score and the mean log score
    (docs/evidence/granularity.md).
    """
    check_shapes("score BHT", score_BHT)
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
