"""What else a layer computes for a token, in Triton: norm, rotation and gate, one launch each over all rows.

The rotation's launch may also append the keys that it makes, and the values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile.triton import row_start
from sfi_kernels.chained_triton import await_previous
from sfi_kernels.fused.reference import MAX_HEAD, MAX_ROW, Appending, check_gate, check_norm, check_rotation
from sfi_kernels.launch import KernelLimitError, launch
from sfi_kernels.pages import row_constants

WARP_NUMBERS, MOST_WARPS = 512, 16  # of a norm's row, to a warp: 16 numbers to a thread
TILE_NUMBERS, TILE_WARPS = 512, 2  # of a program that rotates: four heads of 128
GATE_NUMBERS, GATE_WARPS = 1024, 4
# below, exp(-gate) overflows float32; here SiLU is 1e-36 or less, and 0 in PyTorch
LEAST = tl.constexpr(-88.0)


@triton.jit
def _rms_norm_kernel(
    hidden_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, eps, F: tl.constexpr, BLOCK: tl.constexpr,
    ADD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
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
    return _norm(hidden_XF, None, weight_F, eps)[1]


def add_rms_norm(
    residual_XF: torch.Tensor, hidden_XF: torch.Tensor, weight_F: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `reference.add_rms_norm`. F up to 16384."""
    return _norm(hidden_XF, residual_XF, weight_F, eps)


def _norm(
    hidden_XF: torch.Tensor, residual_XF: torch.Tensor | None, weight_F: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    check_norm(hidden_XF, weight_F, residual_XF)
    F, add = weight_F.shape[0], residual_XF is not None
    if F > MAX_ROW:
        raise KernelLimitError(f"hidden must be at most {MAX_ROW} wide for the kernel, got {F}")
    block, out_XF = triton.next_power_of_2(F), torch.empty_like(hidden_XF)
    sum_XF = torch.empty_like(hidden_XF) if add else out_XF
    launch(
        _rms_norm_kernel, (hidden_XF.numel() // F,), hidden_XF, residual_XF if add else hidden_XF, weight_F, sum_XF,
        out_XF, eps, num_warps=min(MOST_WARPS, max(1, block // WARP_NUMBERS)), F=F, BLOCK=block, ADD=add,
    )  # fmt: skip
    return sum_XF, out_XF


@triton.jit
def rounded(number, dtype):
    """Round a float32 number to a dtype's."""
    return number.to(dtype).to(tl.float32)


@triton.jit
def _rotate_heads(
    in_ptr, out_ptr, weight_ptr, token, token_stride, block, heads, cos_1, cos_2, sin_1, sin_2, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    dtype = out_ptr.dtype.element_ty
    head, column = block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads)[:, None] & (column < HALF)
    place = head[:, None] * D + column  # [BLOCK_H, BLOCK_D]
    in_ptr += token * token_stride
    first = tl.load(in_ptr + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(in_ptr + place + HALF, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(first * first + second * second, 1) / D
        scale = tl.rsqrt(mean + eps)[:, None]
        weight_1 = tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        weight_2 = tl.load(weight_ptr + column + HALF, mask=column < HALF, other=0.0).to(tl.float32)
        first = rounded(weight_1 * rounded(first * scale, dtype), dtype)
        second = rounded(weight_2 * rounded(second * scale, dtype), dtype)
    turned_1 = rounded(first * cos_1, dtype) - rounded(second * sin_1, dtype)
    turned_2 = rounded(second * cos_2, dtype) + rounded(first * sin_2, dtype)
    out_ptr += token * heads * D
    tl.store(out_ptr + place, turned_1.to(dtype), mask=mask)
    tl.store(out_ptr + place + HALF, turned_2.to(dtype), mask=mask)
    return turned_1, turned_2, mask


@triton.jit(do_not_specialize=["T", "N", "pages"])
def _rotary_kernel(
    query_ptr, key_ptr, cos_ptr, sin_ptr, query_weight_ptr, key_weight_ptr, query_out_ptr, key_out_ptr,
    value_ptr, start_ptr, count_ptr, key_pages_ptr, value_pages_ptr, norm_ptr, block_table_ptr,
    query_token_stride, key_token_stride, query_heads, key_heads, T, angle_batch_stride, angle_token_stride, eps,
    value_batch_stride, value_token_stride, value_head_stride, N, pages,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, APPENDS: tl.constexpr,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    await_previous(CHAINED)
    HALF: tl.constexpr = D // 2
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks, key_blocks = tl.cdiv(query_heads, BLOCK_H), tl.cdiv(key_heads, BLOCK_H)
    if APPENDS:  # of the T tokens of a request its own are the last
        request, head = token // T, block % key_blocks * BLOCK_H + tl.arange(0, BLOCK_H)
        order = token % T - T + tl.load(count_ptr + request)
        position = tl.load(start_ptr + request) + order
        page = tl.load(block_table_ptr + request * pages + position // N, mask=order >= 0, other=0)
        is_new = (head < tl.where(order >= 0, key_heads, 0))[:, None]
        if block >= query_blocks + key_blocks:
            values_ptr = value_ptr + request * value_batch_stride + token % T * value_token_stride
            number = tl.arange(0, BLOCK_E)[None, :]
            there = is_new & (number < E)
            value = tl.load(values_ptr + head[:, None].to(tl.int64) * value_head_stride + number, mask=there, other=0.0)
            goal = row_start(page, head, position % N, VALUE_STRIDES)[:, None] + number
            tl.store(value_pages_ptr + goal, value, mask=there)
            return
    angle = token // T * angle_batch_stride + token % T * angle_token_stride
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = column < HALF
    cos_1 = tl.load(cos_ptr + angle + column, mask=inside, other=0.0).to(tl.float32)  # [1, BLOCK_D]
    cos_2 = tl.load(cos_ptr + angle + column + HALF, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angle + column, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angle + column + HALF, mask=inside, other=0.0).to(tl.float32)
    if block < query_blocks:
        _rotate_heads(
            query_ptr, query_out_ptr, query_weight_ptr, token, query_token_stride, block, query_heads,
            cos_1, cos_2, sin_1, sin_2, eps, D, HALF, BLOCK_H, BLOCK_D, NORM,
        )  # fmt: skip
    else:
        key_1, key_2, mask = _rotate_heads(
            key_ptr, key_out_ptr, key_weight_ptr, token, key_token_stride, block - query_blocks, key_heads,
            cos_1, cos_2, sin_1, sin_2, eps, D, HALF, BLOCK_H, BLOCK_D, NORM,
        )  # fmt: skip
        if APPENDS:
            dtype = key_out_ptr.dtype.element_ty
            key_1, key_2 = rounded(key_1, dtype), rounded(key_2, dtype)
            target = row_start(page, head, position % N, KEY_STRIDES)[:, None] + column
            tl.store(key_pages_ptr + target, key_1.to(dtype), mask=mask & is_new)
            tl.store(key_pages_ptr + target + HALF, key_2.to(dtype), mask=mask & is_new)
            norm = tl.sqrt_rn(tl.sum(key_1 * key_1 + key_2 * key_2, 1))[:, None]
            place = (page.to(tl.int64) * key_heads + head[:, None]) * N + position % N
            tl.store(norm_ptr + place, norm, mask=is_new)


def rotary(
    query_BTXD: torch.Tensor, key_BTHD: torch.Tensor, cos_BTD: torch.Tensor, sin_BTD: torch.Tensor,
    query_weight_D: torch.Tensor | None = None, key_weight_D: torch.Tensor | None = None,
    eps: float = 0.0, appending: Appending | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `reference.rotary`. D and E up to 256; the keys' norms may differ from those of `append` by a rounding."""
    distances = check_rotation(query_BTXD, key_BTHD, cos_BTD, sin_BTD, query_weight_D, key_weight_D, appending)
    (B, T, X, D), H = query_BTXD.shape, key_BTHD.shape[2]
    if D > MAX_HEAD:
        raise KernelLimitError(f"heads must be at most {MAX_HEAD} wide for the kernel, got {D}")
    query_out, key_out = (rows.new_empty(rows.shape) for rows in (query_BTXD, key_BTHD))
    normed = query_weight_D is not None
    weights = (query_weight_D, key_weight_D) if normed else (cos_BTD, cos_BTD)  # never read
    half = triton.next_power_of_2(D // 2)
    block = max(1, TILE_NUMBERS // (2 * half))
    key_blocks, sizes = triton.cdiv(H, block), [0] * 5
    into: Sequence[torch.Tensor] = [cos_BTD] * 7
    constants: dict[str, Any] = {"KEY_STRIDES": (), "VALUE_STRIDES": (), "E": 0, "BLOCK_E": 1}
    if appending is not None:
        value, *_, key_PHND, value_PHNE, _, table = into = appending
        key_blocks, sizes = 2 * key_blocks, [*value.stride()[:3], key_PHND.shape[2], table.shape[1]]
        constants |= {name: x for name, x in row_constants(key_PHND, value_PHNE).items() if name in constants}
    launch(
        _rotary_kernel, (B * T, triton.cdiv(X, block) + key_blocks),
        query_BTXD, key_BTHD, cos_BTD, sin_BTD, *weights, query_out, key_out, *into, *distances,
        X, H, T, cos_BTD.stride(0) if cos_BTD.shape[0] > 1 else 0, cos_BTD.stride(1), eps, *sizes,
        # in bfloat16 a product that is rounded and then added became one fma, which skips the rounding
        num_warps=TILE_WARPS, contracts=0, D=D, BLOCK_H=block, BLOCK_D=half, NORM=normed,
        APPENDS=appending is not None, **constants,
    )  # fmt: skip
    return query_out.transpose(1, 2), key_out.transpose(1, 2)


@triton.jit
def gated_numbers(gate, up, dtype):
    """Multiply SiLU of a gate, rounded to a dtype, by up, all of float32."""
    silu = rounded(tl.div_rn(gate, 1.0 + tl.exp(-tl.maximum(gate, LEAST))), dtype)
    return (silu * up).to(dtype)


@triton.jit
def _silu_mul_kernel(
    gate_ptr, up_ptr, out_ptr, gate_row_stride, up_row_stride, F, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    await_previous(CHAINED)
    dtype = out_ptr.dtype.element_ty
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = column < F
    gate = tl.load(gate_ptr + row * gate_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * F + column, gated_numbers(gate, up, dtype), mask=mask)


def silu_mul(gate_XF: torch.Tensor, up_XF: torch.Tensor) -> torch.Tensor:
    """See `reference.silu_mul`."""
    distances = check_gate(gate_XF, up_XF)
    out_XF = gate_XF.new_empty(gate_XF.shape)
    F = gate_XF.shape[-1]
    launch(
        _silu_mul_kernel, (gate_XF.numel() // F, triton.cdiv(F, GATE_NUMBERS)), gate_XF, up_XF, out_XF, *distances, F,
        num_warps=GATE_WARPS, BLOCK=GATE_NUMBERS,
    )  # fmt: skip
    return out_XF
