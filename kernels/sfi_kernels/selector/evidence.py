"""Evidence from slow-step logits: Eqs. 6-8."""

import torch

from sfi_kernels.selector.numerics import check_not_negative, masked, neighborhood_peak, widened


def pool_neighbors(logits_BHGWT: torch.Tensor, allowed_BT: torch.Tensor | None, span: int) -> torch.Tensor:
    """Give each allowed position the best logit nearby, so that a hit brings its neighbors.

    An extension of ours, not in the paper. Pooling logits pools each query's evidence, up to its
    normalization, since the softmax is monotone.

    Args:
        logits_BHGWT: Scaled attention logits. Any float; -inf where a query may not look.
        allowed_BT: The candidate set J; positions outside keep their logits and give none. None: all allowed.
        span: Positions pooled on each side. 0 returns the input unchanged.

    Returns:
        The pooled logits, [B, H, G, W, T], in the input's dtype.

    Raises:
        ValueError: `span` is negative.
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

    Args:
        logits_BHGWT: Scaled attention logits of the window's queries. Any float; -inf where a
            query may not look, never NaN or +inf.
        allowed_BT: The candidate set J; True where a position may be selected. None: everywhere.
        log_sum_BHGW: Log-sum-exp of each query's logits over J, where it is known already.

    Returns:
        p, [B, H, G, W, T] in float32, of float64 logits in float64; 0 outside J, and each row sums to 1.
        A query that sees nothing of J has a row of zeros, and so adds nothing to the evidence.
    """
    inside = None if allowed_BT is None else allowed_BT[:, None, None, None, :]
    inside_BHGWT = masked(widened(logits_BHGWT), inside, -torch.inf)
    p_BHGWT = inside_BHGWT.softmax(-1) if log_sum_BHGW is None else (inside_BHGWT - log_sum_BHGW[..., None]).exp()
    return p_BHGWT.nan_to_num(0.0)  # NaN where a query sees nothing


def power_mean(probability_BHGWT: torch.Tensor, alpha: float) -> torch.Tensor:
    """Average the window in the alpha-power domain (Eq. 7).

    Paper gap: Eq. 7 is per KV head and does not say how its G query heads share it. As in the released code,
    the mean is over G heads and W queries alike.

    Args:
        probability_BHGWT: p.
        alpha: The power, in (0, 1].

    Returns:
        mu, [B, H, T]; not normalized.
    """
    return widened(probability_BHGWT).pow(alpha).mean(dim=(2, 3))


def evidence(mean_BHT: torch.Tensor, alpha: float) -> torch.Tensor:
    """Map the power mean back and normalize it (Eq. 8).

    Returns:
        f, [B, H, T]; each row sums to 1. With one query per KV head it is Eq. 6's p; a row without any evidence is 0.
    """
    mean_BHT = widened(mean_BHT)
    # the scale of mu cancels in Eq. 8; at 1 it cannot underflow under a large 1 / alpha
    peak_BH1 = mean_BHT.amax(-1, keepdim=True)
    # its peak is 1, or all of it is 0
    relative_BHT = (mean_BHT / peak_BH1.masked_fill(peak_BH1 == 0, 1.0)).pow(1.0 / alpha)
    return relative_BHT / relative_BHT.sum(-1, keepdim=True).clamp_min(1.0)
