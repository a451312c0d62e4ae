"""Appending to the paged KV cache in Triton: one launch for keys, values and norms."""

import torch
import triton
import triton.language as tl

from sfi_kernels.append.reference import check
from sfi_kernels.attention_tile.triton import row_start
from sfi_kernels.launch import launch
from sfi_kernels.pages import row_constants

BLOCK_T = 32


@triton.jit
def _move_rows(new_ptr, pages_ptr, token, token_stride, target, own, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)[None, :]
    mask = own[:, None] & (column < WIDTH)
    rows = tl.load(new_ptr + token[:, None] * token_stride + column, mask=mask, other=0.0)
    tl.store(pages_ptr + target[:, None] + column, rows, mask=mask)
    return rows  # [BLOCK_T, BLOCK]


@triton.jit
def append_rows(
    key_ptr, value_ptr, key_pages_ptr, value_pages_ptr, norm_ptr, page, place, head, token, own, H, N,
    key_token_stride, value_token_stride, KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write some `token`s of a head to their places in the pages, with norms; return the keys, float32."""
    target = row_start(page, head, place, VALUE_STRIDES)  # [BLOCK_T]
    _move_rows(value_ptr, value_pages_ptr, token, value_token_stride, target, own, E, BLOCK_E)
    target = row_start(page, head, place, KEY_STRIDES)
    key = _move_rows(key_ptr, key_pages_ptr, token, key_token_stride, target, own, D, BLOCK_D).to(tl.float32)
    norm_ptr += (page.to(tl.int64) * H + head) * N + place
    tl.store(norm_ptr, tl.sqrt_rn(tl.sum(key * key, 1)), mask=own)
    return key


@triton.jit(do_not_specialize=["T", "N", "pages"])
def _append_kernel(
    key_ptr, value_ptr, start_ptr, count_ptr, key_pages_ptr, value_pages_ptr, norm_ptr,
    block_table_ptr, H, T, N, pages,
    key_batch_stride, key_head_stride, key_token_stride,
    value_batch_stride, value_head_stride, value_token_stride,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    request, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    start, count = tl.load(start_ptr + request), tl.load(count_ptr + request)
    order = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)  # among the new tokens
    own = order < count
    position = start + order
    page = tl.load(block_table_ptr + request * pages + position // N, mask=own, other=0)
    append_rows(
        key_ptr + request * key_batch_stride + head * key_head_stride,
        value_ptr + request * value_batch_stride + head * value_head_stride,
        key_pages_ptr, value_pages_ptr, norm_ptr, page, position % N, head, (T - count + order).to(tl.int64),
        own, H, N, key_token_stride, value_token_stride, KEY_STRIDES, VALUE_STRIDES, D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip


def append(
    key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor,
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, norm_PHN: torch.Tensor,
    block_table_BP: torch.Tensor,
) -> None:  # fmt: skip
    """See `reference.append`. D and E up to 256."""
    fixed = (start_B, count_B, key_PHND, value_PHNE, norm_PHN, block_table_BP)
    check(key_BHTD, value_BHTE, *fixed)
    (B, H, T, _), N = key_BHTD.shape, key_PHND.shape[2]
    block = 1 if T == 1 else BLOCK_T
    launch(
        _append_kernel, (B, H, triton.cdiv(T, block)), key_BHTD, value_BHTE, *fixed,
        H, T, N, block_table_BP.shape[1], *key_BHTD.stride()[:3], *value_BHTE.stride()[:3],
        num_warps=1 if T == 1 else 4, BLOCK_T=block, **row_constants(key_PHND, value_PHNE),
    )  # fmt: skip
