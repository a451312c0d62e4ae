"""Algorithm 2 in plain PyTorch, up to the Top-K."""

import torch
from torch.nn.functional import pad

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.op import check_shapes
from sfi_kernels.selector import formulas

NOTES = "evidence_norm2", "evidence_dot_prior", "prior_norm2", "evidence_entropy"  # |f|^2, f.r, |r|^2, f's in nats


def selector(
    logits_BHGWT: torch.Tensor,
    key_norm_BHT: torch.Tensor,
    allowed_BT: torch.Tensor | None,
    *,
    alpha: float,
    gamma: float,
    beta: float,
    power: float,
    eta: float,
    lambda_clip: float,
    alpha_soft: float,
    radius: int,
    alpha_cross: float,
    temperature: float,
    span: int = 0,
    log_sum_BHGW: torch.Tensor | None = None,
    diagnostics: dict[str, torch.Tensor] | None = None,
    gather: formulas.Gather | None = None,
    interval: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Score the allowed positions of every KV head (Algorithm 2, lines 2-14).

    Every request has its own J, which may be empty; nothing here waits for the device. Logits, of the window's queries,
    are scaled, -inf where a query may not look, never NaN or +inf; the norms of the cached keys are ignored outside J.
    J is `allowed_BT`, bool, None for every position, at less cost, or the same `interval`, first position and one past
    the last, in every request. `alpha` is for Eq. 7, `gamma` for Eq. 9, `beta`, `power` and `eta` for Eq. 11,
    `lambda_clip` for Eq. 18, `alpha_soft` and `radius` for Eqs. 20-21, `alpha_cross` and `temperature` for Eqs. 22-23;
    `span` are the neighbors that a hit brings along (`pool_neighbors`), 0 in the paper.

    `log_sum_BHGW` is the log-sum-exp over J of each query's logits, if attention left it: float32, -inf where a query
    sees nothing of J; ignored with a span, whose pooled logits have another sum. `diagnostics` receives `NOTES`, each
    [B, H] float32. Where processes share the layer's KV heads, `exclude_across_heads` calls `gather` once.

    Returns:
        z_adj, [B, H, T] float32, finite, `MASKED_SCORE` or lower outside J; and lambda*, [B, H]. Of float64
        logits and norms both are float64, though Eqs. 10 and 11 are always in float32.
    """
    check(logits_BHGWT, key_norm_BHT, allowed_BT, log_sum_BHGW, interval, alpha, lambda_clip, temperature, span, radius)
    T = logits_BHGWT.shape[-1]
    if interval is not None:
        logits_BHGWT, key_norm_BHT = (x[..., slice(*interval)] for x in (logits_BHGWT, key_norm_BHT))
        allowed_BT = None
    pooled_BHGWT = formulas.pool_neighbors(logits_BHGWT, allowed_BT, span)
    p_BHGWT = formulas.attention_probability(pooled_BHGWT, allowed_BT, None if span else log_sum_BHGW)
    f_BHT = formulas.evidence(formulas.power_mean(p_BHGWT, alpha), alpha)

    if allowed_BT is None:
        pi_pos_BT = formulas.factor_everywhere(logits_BHGWT.shape[-1], logits_BHGWT.device, beta, power, eta)
    else:
        pi_pos_BT = formulas.position_factor(formulas.normalized_position(allowed_BT), beta, power, eta)
    r_BHT = formulas.prior(formulas.key_norm_factor(key_norm_BHT, gamma), pi_pos_BT, allowed_BT)

    lambda_BH = formulas.stable_weight(f_BHT, r_BHT, lambda_clip)
    if diagnostics is not None:
        terms = f_BHT.square(), f_BHT * r_BHT, r_BHT.square(), torch.xlogy(f_BHT, f_BHT)
        *norms, log_sum = (term.sum(-1).float() for term in terms)
        diagnostics.update(zip(NOTES, (*norms, -log_sum), strict=True))
    z_BHT = formulas.log_score(formulas.fuse(f_BHT, r_BHT, lambda_BH), allowed_BT)
    z_nms_BHT = formulas.soft_nms(z_BHT, alpha_soft, radius)
    z_adj_BHT = formulas.exclude_across_heads(z_nms_BHT, alpha_cross, temperature, gather)
    if interval is not None:
        z_adj_BHT = pad(z_adj_BHT, (interval[0], T - interval[1]), value=MASKED_SCORE)
    return z_adj_BHT, lambda_BH


def check(
    logits_BHGWT: torch.Tensor, norm_BHT: torch.Tensor, allowed_BT: torch.Tensor | None, log_sum: torch.Tensor | None,
    interval: tuple[int, int] | None, alpha: float, lambda_clip: float, temperature: float, span: int, radius: int,
) -> None:  # fmt: skip
    """Raise `ValueError` on what does not fit, or would give wrong or non-finite scores without a word."""
    check_shapes("logits BHGWT, key_norm BHT", logits_BHGWT, norm_BHT)
    B, H, G, W, T = logits_BHGWT.shape
    if allowed_BT is not None:
        check_shapes("allowed BT", allowed_BT, B=B, T=T)
        if allowed_BT.dtype != torch.bool:
            raise ValueError(f"allowed must be bool, got {allowed_BT.dtype}")
    if log_sum is not None:
        check_shapes("log_sum BHGW", log_sum, B=B, H=H, G=G, W=W)
        if log_sum.dtype != torch.float32:
            raise ValueError(f"log_sum must be float32, got {log_sum.dtype}")
    if interval is not None and not 0 <= interval[0] < interval[1] <= T:
        raise ValueError(f"interval must hold positions in [0, {T}), got {interval}")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if not 0 <= lambda_clip <= 1:
        raise ValueError(f"lambda_clip must be in [0, 1], got {lambda_clip}")
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    formulas.check_not_negative(span, "span")
    formulas.check_not_negative(radius, "radius")
