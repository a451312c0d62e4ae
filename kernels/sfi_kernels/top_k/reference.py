"""Top-K with an exact tie rule, in plain PyTorch."""

import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.shapes import check_shape


def top_k(score_BHT: torch.Tensor, budget: int) -> torch.Tensor:
    """Select the best positions of every KV head; the lower position wins a tie (Eq. 24).

    The result is a function of the scores alone, the same on every device; `torch.topk` breaks
    ties as it likes. Nothing here waits for the device.

    Args:
        score_BHT: Refined log scores, not NaN. Any float; a position at or below
            `MASKED_SCORE / 2` is outside J and never selected.
        budget: Positions to select per KV head, in tokens.

    Returns:
        index, [B, H, K] int32 with K = min(budget, T): ascending positions, then -1 where fewer
        than K may be selected.

    Raises:
        ValueError: `budget` is not positive, or the scores are not of rank 3.
    """
    check(score_BHT, budget)
    B, H, T = score_BHT.shape
    K = min(budget, T)
    worst_BH1 = score_BHT.topk(K, dim=-1).values[..., -1:]
    above_BHT = score_BHT > worst_BH1
    tied_BHT = score_BHT == worst_BH1
    room_BH1 = K - above_BHT.sum(-1, keepdim=True)
    kept_BHT = above_BHT | (tied_BHT & (tied_BHT.cumsum(-1) <= room_BH1))
    kept_BHT &= score_BHT > MASKED_SCORE / 2

    # each kept position goes to the slot of its rank, all others to a last slot that is cut off
    slot_BHT = (kept_BHT.cumsum(-1) - 1).masked_fill(~kept_BHT, K)
    position_BHT = torch.arange(T, device=score_BHT.device, dtype=torch.int32).expand(B, H, T)
    index_BHK = position_BHT.new_full((B, H, K + 1), -1)
    return index_BHK.scatter_(-1, slot_BHT, position_BHT)[..., :K].contiguous()


def check(score_BHT: torch.Tensor, budget: int) -> None:
    """Raise where `top_k` says so."""
    if budget <= 0:
        raise ValueError(f"budget must be positive, got {budget}")
    check_shape(score_BHT, "score", B=None, H=None, T=None)
