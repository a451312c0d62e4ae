"""Norms and rotary positions in Triton: one launch for the queries and the keys of a layer."""

import torch
import triton
import triton.language as tl

from sfi_kernels.launch import KernelLimitError, launch
from sfi_kernels.rotary.reference import MAX_WIDTH, check

TILE_NUMBERS = 512  # of a program: four heads of 128
WARPS = 2


@triton.jit
def _rounded(number, dtype):
    return number.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    in_ptr, out_ptr, weight_ptr, token, token_stride, block, heads, cos_1, cos_2, sin_1, sin_2, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    dtype = out_ptr.dtype.element_ty
    head, column = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads)[:, None] & (column < HALF)
    own = head[:, None] * D + column  # [BLOCK_H, BLOCK_D]
    in_ptr += token * token_stride
    first = tl.load(in_ptr + own, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(in_ptr + own + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(first * first + second * second, 1) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        weight_1 = tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        weight_2 = tl.load(weight_ptr + column + HALF, mask=column < HALF, other=0.0).to(tl.float32)
        first = _rounded(weight_1 * _rounded(first * scale, dtype), dtype)
        second = _rounded(weight_2 * _rounded(second * scale, dtype), dtype)
    turned_1 = _rounded(first * cos_1, dtype) - _rounded(second * sin_1, dtype)
    turned_2 = _rounded(second * cos_2, dtype) + _rounded(first * sin_2, dtype)
    out_ptr += token * heads * D
    tl.store(out_ptr + own, turned_1.to(dtype), mask=mask)
    tl.store(out_ptr + own + HALF, turned_2.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["T"])
def _rotary_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, query_out_ptr, key_out_ptr,
    query_token_stride, key_token_stride, query_heads, key_heads, T, angle_batch_stride, angle_token_stride, eps,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = token // T * angle_batch_stride + token % T * angle_token_stride
    column = tl.arange(0, BLOCK_D)[None, :]
    own = column < HALF
    cos_1 = tl.load(cos_ptr + angle + column, mask=own, other=0.0).to(tl.float32)  # [1, BLOCK_D]
    cos_2 = tl.load(cos_ptr + angle + column + HALF, mask=own, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angle + column, mask=own, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angle + column + HALF, mask=own, other=0.0).to(tl.float32)
    query_blocks = tl.cdiv(query_heads, BLOCK_H)
    if block < query_blocks:
        _rotate_heads(
            query_ptr, query_out_ptr, query_weight_ptr, token, query_token_stride, block, query_heads,
            cos_1, cos_2, sin_1, sin_2, eps, D, HALF, BLOCK_H, BLOCK_D, NORM,
        )  # fmt: skip
    else:
        _rotate_heads(
            key_ptr, key_out_ptr, key_weight_ptr, token, key_token_stride, block - query_blocks, key_heads,
            cos_1, cos_2, sin_1, sin_2, eps, D, HALF, BLOCK_H, BLOCK_D, NORM,
        )  # fmt: skip


def rotary(
    query_BTXD: torch.Tensor, key_BTHD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor,
    query_weight_D: torch.Tensor | None = None, key_weight_D: torch.Tensor | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `reference.rotary`. D up to 256."""
    distances = check(query_BTXD, key_BTHD, cos_BTD, sin_BTD, query_weight_D, key_weight_D)
    (B, T, X, D), H = query_BTXD.shape, key_BTHD.shape[2]
    if D > MAX_WIDTH:
        raise KernelLimitError(f"heads must be at most {MAX_WIDTH} wide for the kernel, got {D}")
    query_out, key_out = (rows.new_empty(rows.shape) for rows in (query_BTXD, key_BTHD))
    normed = query_weight_D is not None
    weights = (query_weight_D, key_weight_D) if normed else (cos_BTD, cos_BTD)  # never read
    half = triton.next_power_of_2(D // 2)
    block = max(1, TILE_NUMBERS // (2 * half))
    launch(
        _rotary_kernel, (B * T, triton.cdiv(X, block) + triton.cdiv(H, block)),
        query_BTXD, key_BTHD, cos_BTD, sin_BTD, *weights, query_out, key_out, *distances,
        X, H, T, cos_BTD.stride(0) if cos_BTD.shape[0] > 1 else 0, cos_BTD.stride(1), eps,
        # in bfloat16 a product that is rounded and then added became one fma, which skips the rounding
        num_warps=WARPS, contracts=0, D=D, BLOCK_H=block, BLOCK_D=half, NORM=normed,
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)
