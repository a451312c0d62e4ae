"""Choosing by probability on a CPU, compiled."""

import torch

from sfi_kernels import loops
from sfi_kernels.choice.reference import check


def choose_likeliest(
    logits_HGT: torch.Tensor, budget: int, *, rest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.choose_likeliest`; `logits_HGT` must be contiguous.

    Weights have float32's rounding, and those below its normal numbers are 0 and tie.
    """
    check(logits_HGT, budget)
    H, G, _ = logits_HGT.shape
    index_HK, unread_HG = torch.empty(H, budget, dtype=torch.int32), torch.empty(H, G)
    loops.choose(logits_HGT.numpy(), budget, loops.F(rest), index_HK.numpy(), unread_HG.numpy())
    return index_HK, unread_HG
