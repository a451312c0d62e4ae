"""The gate of an MLP in Triton: one launch over all numbers."""

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
def _silu_mul_kernel(gate_ptr, up_ptr, out_ptr, numbers, BLOCK: tl.constexpr):
    dtype = out_ptr.dtype.element_ty
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = place < numbers
    gate = tl.load(gate_ptr + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=mask, other=0.0).to(tl.float32)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-tl.maximum(gate, LEAST))).to(dtype).to(tl.float32)
    tl.store(out_ptr + place, (silu * up).to(dtype), mask=mask)


def silu_mul(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    check(gate_XF, up_XF)
    out_XF = torch.empty_like(gate_XF)
    numbers = gate_XF.numel()
    launch(
        _silu_mul_kernel, (triton.cdiv(numbers, BLOCK),), gate_XF, up_XF, out_XF, numbers, num_warps=WARPS, BLOCK=BLOCK
    )
    return out_XF
