"""The gate of an MLP in Triton: one launch over all rows."""

import torch
import triton
import triton.language as tl

from sfi_kernels.launch import launch
from sfi_kernels.silu_mul.reference import check

BLOCK = 1024
WARPS = 4
# below, exp(-gate) overflows float32; here SiLU is 1e-36 or less, and 0 in PyTorch
LEAST = tl.constexpr(-88.0)


@triton.jit
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, gate_row_stride, up_row_stride, F, BLOCK: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = column < F
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-tl.maximum(gate, LEAST))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * F + column, (silu * up).to(dtype), mask=mask)


def silu_mul(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    distances = check(gate_XF, up_XF)
    out_XF = gate_XF.new_empty(gate_XF.shape)
    F = gate_XF.shape[-1]
    launch(
        _silu_mul_kernel, (gate_XF.numel() // F, triton.cdiv(F, BLOCK)), gate_XF, up_XF, out_XF, *distances, F,
        num_warps=WARPS, BLOCK=BLOCK,
    )  # fmt: skip
    return out_XF
