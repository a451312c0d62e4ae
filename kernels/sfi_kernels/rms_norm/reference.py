"""RMSNorm in PyTorch, with every rounding of transformers' `LlamaRMSNorm`."""

import torch

from sfi_kernels.shapes import check_same, check_shape

MAX_WIDTH = 16384  # of the kernel


def rms_norm(hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide rows by their root mean square and multiply by a weight (Zhang and Sennrich, 2019).

    Rows, [..., F], are contiguous; `eps` is added to the mean square. The quotient is float32 (float64 of float64
    rows), rounded to the rows' dtype, which is the weight's too, before the product. Raise `ValueError` where shapes,
    dtypes, devices or strides do not fit.
    """
    check(hidden_XF, weight_F)
    wide_XF = hidden_XF.to(torch.promote_types(hidden_XF.dtype, torch.float32))
    mean_X1 = wide_XF.square().mean(-1, keepdim=True)
    return weight_F * (wide_XF * torch.rsqrt(mean_X1 + eps)).to(hidden_XF.dtype)


def add_rms_norm(
    residual_XF: torch.Tensor, hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add rows to the residual stream; return the sum, rounded to the dtype, and that sum's `rms_norm`."""
    check_residual(residual_XF, hidden_XF, weight_F)
    sum_XF = residual_XF + hidden_XF
    return sum_XF, rms_norm(sum_XF, weight_F, eps)


def check(hidden_XF: torch.Tensor, weight_F: torch.Tensor) -> None:
    """Raise the errors of `rms_norm`."""
    check_shape(weight_F, "weight", F=hidden_XF.shape[-1])
    check_same(hidden_XF, "hidden", weight=weight_F, hidden=hidden_XF)


def check_residual(residual_XF: torch.Tensor, hidden_XF: torch.Tensor, weight_F: torch.Tensor) -> None:
    """Raise the errors of `add_rms_norm`."""
    check(hidden_XF, weight_F)
    check_same(hidden_XF, "hidden", residual=residual_XF)
    if residual_XF.shape != hidden_XF.shape:
        raise ValueError(
            f"residual must have the shape of hidden, {list(hidden_XF.shape)}, got {list(residual_XF.shape)}"
        )
