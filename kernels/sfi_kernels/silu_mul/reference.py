"""The gate of an MLP in PyTorch, with every rounding of transformers' `LlamaMLP`."""

import torch

from sfi_kernels.shapes import check_same


def silu_mul(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> torch.Tensor:
    """Multiply SiLU(gate) = gate / (1 + exp(-gate)) by up (Shazeer, 2020, Eq. 6).

    Both are contiguous, of one shape and dtype, or `ValueError` is raised. SiLU is float32, rounded to that
    dtype before the product.
    """
    check(gate_XF, up_XF)
    return torch.nn.functional.silu(gate_XF) * up_XF


def check(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> None:
    """Raise the errors of `silu_mul`."""
    check_same(gate_XF, "gate", gate=gate_XF, up=up_XF)
    if up_XF.shape != gate_XF.shape:
        raise ValueError(f"up must have the shape of gate, {list(gate_XF.shape)}, got {list(up_XF.shape)}")
