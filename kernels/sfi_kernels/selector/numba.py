"""The Selector on a CPU, compiled: a request's logits are read twice, and nothing of their size is written."""

from collections.abc import Callable

import numpy as np
import torch

from sfi_kernels.compiled import by_heads
from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.loops import selection
from sfi_kernels.loops.vectors import F
from sfi_kernels.numpy_views import plain
from sfi_kernels.selector.prior import factor_everywhere
from sfi_kernels.selector.reference import check, check_interval, check_settings

NUMBER = 5e-3  # microseconds of a logit, on a Zen 3
NOTES = "evidence_norm2", "evidence_dot_prior", "prior_norm2", "evidence_entropy"


def selector(
    logits_BHGWT: torch.Tensor, key_norm_BHT: torch.Tensor, allowed_BT: torch.Tensor | None, *, alpha: float,
    gamma: float, beta: float, power: float, eta: float, lambda_clip: float, alpha_soft: float, radius: int,
    alpha_cross: float, temperature: float, span: int = 0, log_sum_BHGW: torch.Tensor | None = None,
    diagnostics: dict[str, torch.Tensor] | None = None,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None, interval: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `reference.selector`. J must be an interval, of float32 logits and norms, and the heads all of them."""
    check(logits_BHGWT, key_norm_BHT, allowed_BT, log_sum_BHGW)
    check_settings(alpha, lambda_clip, temperature, span, radius)
    B, H, G, W, T = logits_BHGWT.shape
    check_interval(interval, T)
    if gather is not None or (interval is None and allowed_BT is not None):
        raise ValueError("interval must be given to numba, and no gather")
    first, stop = interval or (0, T)
    place_1N = factor_everywhere(stop - first, logits_BHGWT.device, beta, power, eta)
    score_BHT = torch.full((B, H, T), MASKED_SCORE)
    lambda_BH, note_BHX = torch.empty(B, H), torch.empty(0 if diagnostics is None else B, H, len(NOTES))
    sums = np.empty((0, 0, 0), F) if span or log_sum_BHGW is None else plain(log_sum_BHGW).reshape(B, H, G * W)
    arguments = (
        plain(logits_BHGWT).reshape(B, H, G * W, T), sums, plain(key_norm_BHT), plain(place_1N)[0], first, span,
        F(alpha), F(gamma), F(lambda_clip), F(alpha_soft), radius, F(alpha_cross), F(temperature),
        score_BHT.numpy(), lambda_BH.numpy(), note_BHX.numpy(),
    )  # fmt: skip
    by_heads(lambda begin, end: selection.select(begin, end, *arguments), B, NUMBER * logits_BHGWT.numel())
    if diagnostics is not None:
        diagnostics.update(zip(NOTES, note_BHX.unbind(-1), strict=True))
    return score_BHT, lambda_BH
