"""RMSNorm in Triton: one program a row, which reads the row once."""

import torch
import triton
import triton.language as tl

from sfi_kernels.launch import KernelLimitError, launch
from sfi_kernels.rms_norm.reference import MAX_WIDTH, check, check_residual

WARP_NUMBERS = 512  # of a row, to a warp: 16 numbers to a thread
MOST_WARPS = 16


@triton.jit
def _rms_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, eps, F: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr
):
    dtype = out_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    mask = column < F
    place = tl.program_id(0).to(tl.int64) * F + column  # [BLOCK]
    hidden = tl.load(hidden_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        total = (residual + hidden).to(dtype)
        tl.store(sum_ptr + place, total, mask=mask)
        hidden = total.to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(hidden * hidden, 0) / F
    normed = (hidden * tl.rsqrt(mean + eps)).to(dtype).to(tl.float32)
    tl.store(out_ptr + place, (weight * normed).to(dtype), mask=mask)


def rms_norm(hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float) -> torch.Tensor:
    """See `reference.rms_norm`. F up to 16384."""
    check(hidden_XF, weight_F)
    out_XF = torch.empty_like(hidden_XF)
    _launch(hidden_XF, hidden_XF, weight_F, out_XF, out_XF, eps, add=False)
    return out_XF


def add_rms_norm(
    residual_XF: torch.Tensor, hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`. F up to 16384."""
    check_residual(residual_XF, hidden_XF, weight_F)
    sum_XF, out_XF = torch.empty_like(hidden_XF), torch.empty_like(hidden_XF)
    _launch(hidden_XF, residual_XF, weight_F, sum_XF, out_XF, eps, add=True)
    return sum_XF, out_XF


def _launch(
    hidden_XF: torch.Tensor, residual_XF: torch.Tensor, weight_F: torch.Tensor,
    sum_XF: torch.Tensor, out_XF: torch.Tensor, eps: float, *, add: bool,
) -> None:  # fmt: skip
    F = weight_F.shape[0]
    if F > MAX_WIDTH:
        raise KernelLimitError(f"hidden must be at most {MAX_WIDTH} wide for the kernel, got {F}")
    block = triton.next_power_of_2(F)
    launch(
        _rms_norm_kernel, (hidden_XF.numel() // F,), hidden_XF, residual_XF, weight_F, sum_XF, out_XF, eps,
        num_warps=min(MOST_WARPS, max(1, block // WARP_NUMBERS)),
        F=F, BLOCK=block, ADD=add,
    )  # fmt: skip
