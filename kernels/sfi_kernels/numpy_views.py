"""Tensors as the numpy arrays that numba's loops take, without a copy where they lie so."""

from typing import Any

import numpy as np
import torch

from sfi_kernels.compiled import why_not

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `loops` numbers them

NO_FLOATS, NO_HALVES = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)


def plain(tensor: torch.Tensor) -> Any:
    """Return a tensor as contiguous float32."""
    if tensor.dtype is not torch.float32 or tensor.requires_grad or not tensor.is_contiguous():
        tensor = tensor.detach().float().contiguous()
    return tensor.numpy()


def fastest(backend: str, device: torch.device, *pages: torch.Tensor) -> str:
    """Return "numba" in place of "torch" on a CPU where numba compiles and its loops read `pages`; else `backend`."""
    compiles = backend == "torch" and device.type == "cpu" and not why_not()
    return "numba" if compiles and readable(*pages) else backend


def readable(*pages: torch.Tensor) -> bool:
    """Say whether the loops read pages [P, H, N, D] as they lie: rows of a multiple of 8 numbers."""
    return all(
        page.device.type == "cpu" and page.dtype in KINDS and page.is_contiguous() and page.shape[-1] % 8 == 0
        for page in pages
    )


def rows_of(page_PHND: torch.Tensor) -> tuple[Any, Any]:
    """Return `readable` pages as rows [P * H * N, D], of float32 and of uint16; one of the two is empty."""
    row_XD = page_PHND.detach().view(-1, page_PHND.shape[3])
    if row_XD.dtype == torch.float32:
        return row_XD.numpy(), NO_HALVES
    return NO_FLOATS, row_XD.view(torch.uint16).numpy()
