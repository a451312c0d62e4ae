"""Reverse-KL fusion of evidence and prior: Eqs. 15, 17 and 18.

Eqs. 13, 14 and 16 are the derivation; `tests/kernels/test_fusion.py` checks them.
"""

import torch

from sfi_kernels.selector.numerics import widened


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
