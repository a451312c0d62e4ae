"""Choosing by probability, in PyTorch."""

from collections.abc import Callable

import torch

from sfi_kernels.shapes import check_shape
from sfi_kernels.top_k import top_k


def choose_likeliest(
    logits_HGT: torch.Tensor, budget: int, *, rest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the keys of one request that are likeliest, in the mean over the query heads of a KV head.

    Args:
        logits_HGT: Logits of the candidates, float32, not NaN; undefined afterwards.
        budget: Keys to choose by KV head, fewer than T; the lower position wins a tie.
        rest: Factor on the probability of the keys that are not chosen.

    Returns:
        index_HK, int32, ascending, and the log of `rest` times the summed exponentials of the other keys'
            logits, unread_HG, float32; -inf if that is 0.
    """
    return choose_by(top_k.reference, logits_HGT, budget, rest)


def choose_by(
    select: Callable[[torch.Tensor, int], torch.Tensor],
    logits_HGT: torch.Tensor,
    budget: int,
    rest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose as `choose_likeliest`, with an implementation of `top_k`."""
    check(logits_HGT, budget)
    H, G, _ = logits_HGT.shape
    log_sum_HG = logits_HGT.logsumexp(-1)
    weight_HGT = (logits_HGT - log_sum_HG[..., None]).exp()
    index_HK = select(weight_HGT.mean(1)[None], budget)[0]
    read_HGK = weight_HGT.gather(2, index_HK.long()[:, None].expand(H, G, -1))
    unread_HG = (1 - read_HGK.sum(-1)).clamp_min(0) * rest
    return index_HK, log_sum_HG + unread_HG.log()


def check(logits_HGT: torch.Tensor, budget: int) -> None:
    """Raise `ValueError` unless there is something to choose."""
    check_shape(logits_HGT, "logits", H=None, G=None, T=None)
    if not 0 < budget < logits_HGT.shape[2]:
        raise ValueError(f"budget must be within 1 and {logits_HGT.shape[2] - 1}, got {budget}")
