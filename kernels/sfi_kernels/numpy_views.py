"""Tensors as the numpy arrays that numba's loops take, without a copy where they lie so."""

from typing import Any

import torch

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `loops` numbers them


def plain(tensor: torch.Tensor) -> Any:
    """Return a tensor as contiguous float32."""
    return tensor.detach().float().contiguous().numpy()


def flat(tensor_HT: torch.Tensor) -> Any:
    """Return the memory from a tensor's first number to its last as one row; the last stride must be 1."""
    H, T = tensor_HT.shape
    return tensor_HT.as_strided(((H - 1) * tensor_HT.stride(0) + T,), (1,)).numpy()


def readable(*pages: torch.Tensor) -> bool:
    """Say whether the loops read pages [P, H, N, D] as they lie."""
    return all(
        page.device.type == "cpu" and page.dtype in KINDS and page.is_contiguous() for page in pages
    )


def halves(page_PHND: torch.Tensor) -> Any:
    """Return `readable` pages as rows of 16-bit halves, [P * H * N, D or 2 D] uint16."""
    return page_PHND.detach().view(-1, page_PHND.shape[3]).view(torch.uint16).numpy()
