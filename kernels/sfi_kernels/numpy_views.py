"""Tensors as the numpy arrays that numba's loops take, without a copy where they lie so."""

from typing import Any

import numpy as np
import torch

from sfi_kernels.compiled import why_not

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as `loops` numbers them

NUMBER = 3e-4  # microseconds of a query's number and row in attention, on a Zen 4
NO_FLOATS, NO_HALVES = np.empty((0, 0), np.float32), np.empty((0, 0), np.uint16)
NO_PAGES = NO_FLOATS, NO_FLOATS, NO_HALVES, NO_HALVES


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


def check_readable(*pages: torch.Tensor) -> None:
    """Raise `ValueError` unless pages are `readable`."""
    if not readable(*pages):
        raise ValueError(
            "pages must be contiguous, on the CPU, of a multiple of 8 numbers a row, and float32, bfloat16 or float16"
        )


def pages_of(key_PHND: torch.Tensor, value_PHNE: torch.Tensor) -> tuple[Any, ...]:
    """Return `readable` pages as rows of keys and of values: of float32, then of uint16; two of the four are empty."""
    key_XD, value_XE = (pages.detach().view(-1, pages.shape[3]) for pages in (key_PHND, value_PHNE))
    if key_XD.dtype == torch.float32:
        return key_XD.numpy(), value_XE.numpy(), NO_HALVES, NO_HALVES
    return NO_FLOATS, NO_FLOATS, key_XD.view(torch.uint16).numpy(), value_XE.view(torch.uint16).numpy()
