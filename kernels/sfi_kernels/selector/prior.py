"""Cache-aware prior on allowed positions: Eqs. 9-12."""

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
