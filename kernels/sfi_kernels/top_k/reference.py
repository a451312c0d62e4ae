"""Top-K with an exact tie rule, in plain PyTorch."""

import numpy as np
import torch

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.op import check_shapes


def top_k(score_BHT: torch.Tensor, budget: int) -> torch.Tensor:
    """Select the `budget` best positions of every KV head; the lower position wins a tie (Eq. 24).

    The result depends on the scores alone and is the same on every device; `torch.topk` breaks ties as it likes. Scores
    are not NaN; a position at or below `MASKED_SCORE / 2` is outside J and never selected. The index, [B, H, K] int32
    with K = min(budget, T), has ascending positions, then -1 where fewer than K are allowed. The host never waits.
    """
    check(score_BHT, budget)
    K = min(budget, score_BHT.shape[2])
    return _on_cpu(score_BHT, K) if score_BHT.device.type == "cpu" else without_wait(score_BHT, K)


def without_wait(score_BHT: torch.Tensor, K: int) -> torch.Tensor:
    """Compute `top_k` without waiting for a device."""
    B, H, T = score_BHT.shape
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


def _on_cpu(score_BHT: torch.Tensor, K: int) -> torch.Tensor:
    # numpy's partition takes a tenth of topk's time; on a CPU a look at the counts waits for no device
    B, H, T = score_BHT.shape
    wide_BHT = score_BHT.detach().to(torch.promote_types(score_BHT.dtype, torch.float32))
    ordered_BHT = torch.from_numpy(np.partition(wide_BHT.numpy(), T - K, axis=-1))
    worst_BH1 = ordered_BHT[..., T - K : T - K + 1]
    kept_BHT = wide_BHT >= worst_BH1
    count_BH = kept_BHT.sum(-1)
    if (count_BH > K).any():
        above_BHT = wide_BHT > worst_BH1
        room_BH1 = K - above_BHT.sum(-1, keepdim=True)
        kept_BHT = above_BHT | (kept_BHT & ((kept_BHT & ~above_BHT).cumsum(-1) <= room_BH1))
    if (worst_BH1 <= MASKED_SCORE / 2).any():
        kept_BHT &= wide_BHT > MASKED_SCORE / 2
    row_X, position_X = kept_BHT.view(B * H, T).nonzero(as_tuple=True)
    if len(position_X) == B * H * K:
        return position_X.view(B, H, K).int()
    index_BHK = torch.full((B * H, K), -1, dtype=torch.int32)
    slot_X = torch.arange(len(row_X)) - torch.searchsorted(row_X, torch.arange(B * H))[row_X]
    index_BHK[row_X, slot_X] = position_X.int()
    return index_BHK.view(B, H, K)


def check(score_BHT: torch.Tensor, budget: int) -> None:
    """Raise the errors of `top_k`."""
    if budget <= 0:
        raise ValueError(f"budget must be positive, got {budget}")
    check_shapes("score BHT", score_BHT)
