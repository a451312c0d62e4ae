"""The gate of an MLP in PyTorch, with every rounding of transformers' `LlamaMLP`."""

import torch

from sfi_kernels.shapes import check_pages, row_distance


def silu_mul(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU(gate) = gate / (1 + exp(-gate)) by up (Shazeer, 2020, Eq. 6).

    Both are of one shape and dtype, their rows, [..., F], at one distance, or `ValueError` is raised. SiLU is float32,
    rounded to that dtype before the product.
    """
    check(gate_XF, up_XF)
    return torch.nn.functional.silu(gate_XF) * up_XF


def check(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> tuple[int, int]:
    """Raise the errors of `silu_mul`; return the distances of the rows."""
    check_pages(gate_XF, "gate", up=up_XF)
    if up_XF.shape != gate_XF.shape:
        raise ValueError(f"up must have the shape of gate, {list(gate_XF.shape)}, got {list(up_XF.shape)}")
    F = gate_XF.shape[-1]
    return row_distance(gate_XF, "gate", F), row_distance(up_XF, "up", F)
