"""Choosing by probability: PyTorch's operations around the kernel of `top_k`."""

import torch

from sfi_kernels.choice.reference import choose_by
from sfi_kernels.top_k import top_k


def choose_likeliest(
    logits_HGT: torch.Tensor, budget: int, *, rest: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.choose_likeliest`."""
    return choose_by(top_k.triton, logits_HGT, budget, rest)
