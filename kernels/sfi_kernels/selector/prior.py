"""Cache-aware prior on allowed positions, Eqs. 9-12, and its reverse-KL fusion with the evidence, Eqs. 15, 17 and 18.

Eqs. 13, 14 and 16 are the derivation; `tests/kernels/test_fusion.py` checks them.
"""

from functools import lru_cache

import torch

from sfi_kernels.constants import EPS
from sfi_kernels.selector.numerics import distribution, masked, widened


def key_norm_factor(key_norm_BHT: torch.Tensor, gamma: float) -> torch.Tensor:
    """Penalize unusually long keys (Eq. 9).

    `gamma` >= 0 is the strength of the penalty. Paper gap: not given.

    Returns:
        pi_kn, [B, H, T] in float32, of float64 norms in float64; unnormalized, and finite even for a key of norm 0.
    """
    factor_BHT = (widened(key_norm_BHT) + EPS).pow(-gamma)
    return factor_BHT.clamp_max(torch.finfo(torch.float32).max)


def normalized_position(allowed_BT: torch.Tensor) -> torch.Tensor:
    """Place the allowed positions on [0, 1], oldest first (Eq. 10).

    Returns:
        u, [B, T] float32; 0 for a single allowed position, meaningless but in [0, 1] outside J.
    """
    T = allowed_BT.shape[-1]
    position_T = torch.arange(T, device=allowed_BT.device, dtype=torch.float32)
    # T and -1 keep u finite for a request that allows nothing
    first_B1 = position_T.masked_fill(~allowed_BT, T).amin(-1, keepdim=True)
    last_B1 = position_T.masked_fill(~allowed_BT, -1.0).amax(-1, keepdim=True)
    return ((position_T - first_B1) / (last_B1 - first_B1 + EPS)).clamp(0.0, 1.0)


def position_factor(position_BT: torch.Tensor, beta: float, power: float, eta: float) -> torch.Tensor:
    """Discount recency globally and brake at the tail (Eq. 11).

    Args:
        position_BT: u, in [0, 1].
        beta: Strength of the global decay. At least 0. Paper gap: not given.
        power: Curvature p of the decay. At least 1. Paper gap: not given.
        eta: Strength of the tail brake. At least 0. Paper gap: not given.

    Returns:
        pi_pos, [B, T]; unnormalized, in [0, 1].
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
    """Multiply the two factors and normalize on the allowed set, None for everything (Eq. 12).

    Returns:
        r, [B, H, T]; 0 outside J whatever the factors hold there, and each row sums to 1. A
        request that allows nothing has rows of zeros.
    """
    weight_BHT = widened(key_norm_factor_BHT) * widened(position_factor_BT)[:, None]
    return distribution(masked(weight_BHT, None if allowed_BT is None else allowed_BT[:, None], 0.0))


def fuse(evidence_BHT: torch.Tensor, prior_BHT: torch.Tensor, weight_BH: torch.Tensor) -> torch.Tensor:
    """Mix evidence f and prior r, the minimizer of the reverse-KL objective (Eq. 15).

    The rows of f and r sum to 1, on the same support; `weight_BH` is the prior's weight lambda, in [0, 1].

    Returns:
        s, [B, H, T]; each row sums to 1.
    """
    evidence_BHT = widened(evidence_BHT)
    weight_BH1 = weight_BH.to(evidence_BHT.dtype).unsqueeze(-1)
    return torch.lerp(evidence_BHT, prior_BHT.to(evidence_BHT.dtype), weight_BH1)


def stable_weight(evidence_BHT: torch.Tensor, prior_BHT: torch.Tensor, lambda_clip: float) -> torch.Tensor:
    """Find the prior's weight that makes the fused ranking most stable (Eqs. 17-18).

    The rows of evidence f and prior r sum to 1, on the same support.

    Returns:
        lambda*, [B, H], in [0, lambda_clip]; 0 where evidence and prior are equal up to rounding.
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
