"""Dense attention of several queries in Triton, for prompts and verified drafts, and their logits.

A tile's rows are the G query heads of neighboring queries, which share each tile of keys. Keys that every row
sees come first and take no mask; only those around the diagonal do.
"""

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile import QueryTile, prompt_tile, tile_shape
from sfi_kernels.attention_tile.triton import LOG2E, add_sink, add_tile, finish, row_start, rows, scaled_logits
from sfi_kernels.dense_attention.reference import check
from sfi_kernels.launch import launch, target
from sfi_kernels.op import check_int32
from sfi_kernels.pages import kernel_strides

CHUNK = 512  # keys of a program that writes logits


@triton.jit
def _logits(query, key, scale, soft_cap, CAPPED: tl.constexpr):
    """Return a tile's logits with a soft cap, its unscaled products without; `add_tile` scales these."""
    if CAPPED:
        return scaled_logits(query, key, scale, soft_cap, CAPPED)
    return tl.dot(query, tl.trans(key), input_precision="ieee")


@triton.jit(do_not_specialize=["W", "pages_per_request"])
def _dense_attention_kernel(
    query_ptr, key_ptr, value_ptr, block_table_ptr, length_ptr, sink_ptr, out_ptr,
    scale, soft_cap, W, pages_per_request,
    KEY_STRIDES: tl.constexpr, VALUE_STRIDES: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    h, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    # the longest tiles of a causal prompt first
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    w, g, valid = row // G, row % G, row < W * G
    length = tl.load(length_ptr + request)
    position = tl.where(valid, length - W + w, -1)
    base = (request * H + h) * G * W
    head_row = (g * W + w).to(tl.int64)
    query = rows(query_ptr + base * D, head_row, D, valid, D, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    table = block_table_ptr + request * pages_per_request
    unit = 1.0 if CAPPED else scale
    n, stop = tl.arange(0, BLOCK_N), tl.max(position) + 1
    # keys that every row sees take no mask; the first row sees the fewest, rows of no query are not stored
    seen_by_all = tl.maximum(length - W + tl.min(w) + 1, 0) // BLOCK_N * BLOCK_N
    for first in range(0, seen_by_all, BLOCK_N):
        page, token = tl.load(table + first // PAGE), first % PAGE
        key_tile = key_ptr + row_start(page, h, token, KEY_STRIDES)
        value_tile = value_ptr + row_start(page, h, token, VALUE_STRIDES)
        key = rows(key_tile, n, KEY_STRIDES[2], n >= 0, D, BLOCK_D)
        value = rows(value_tile, n, VALUE_STRIDES[2], n >= 0, E, BLOCK_E)
        logits = _logits(query, key, scale, soft_cap, CAPPED)
        peak, total, out = add_tile(peak, total, out, logits, value, unit * LOG2E)
    for first in range(seen_by_all, stop, BLOCK_N):
        page, token = tl.load(table + first // PAGE), first % PAGE
        key_tile = key_ptr + row_start(page, h, token, KEY_STRIDES)
        value_tile = value_ptr + row_start(page, h, token, VALUE_STRIDES)
        key = rows(key_tile, n, KEY_STRIDES[2], first + n < stop, D, BLOCK_D)
        value = rows(value_tile, n, VALUE_STRIDES[2], first + n < stop, E, BLOCK_E)
        logits = _logits(query, key, scale, soft_cap, CAPPED)
        logits = tl.where(first + n[None, :] <= position[:, None], logits, float("-inf"))
        peak, total, out = add_tile(peak, total, out, logits, value, unit * LOG2E)
    out, lse = finish(peak * unit, total, out)
    if SINKS:
        out = add_sink(out, lse, tl.load(sink_ptr + h * G + g))
    e = tl.arange(0, BLOCK_E)
    where = out_ptr + base * E + head_row[:, None] * E + e[None, :]
    tl.store(where, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (e[None, :] < E))


@triton.jit(do_not_specialize=["W", "T", "pages_per_request"])
def _window_logits_kernel(
    query_ptr, key_ptr, block_table_ptr, length_ptr, logits_ptr,
    scale, soft_cap, W, T, pages_per_request,
    KEY_STRIDES: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(2).to(tl.int64)  # request and KV head
    request, h = pair // H, pair % H
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < G * W
    length = tl.load(length_ptr + request)
    position = tl.where(valid, length - W + row % W, -1)
    query = rows(query_ptr + pair * G * W * D, row.to(tl.int64), D, valid, D, BLOCK_D)
    n, begin = tl.arange(0, BLOCK_N), tl.program_id(0) * SPAN
    table = block_table_ptr + request * pages_per_request
    for first in range(begin, tl.minimum(T, begin + SPAN), BLOCK_N):
        page = tl.load(table + first // PAGE)
        key_tile = key_ptr + row_start(page, h, first % PAGE, KEY_STRIDES)
        key = rows(key_tile, n, KEY_STRIDES[2], first + n < length, D, BLOCK_D)
        # Eq. 4
        logits = scaled_logits(query, key, scale, soft_cap, CAPPED)
        logits = tl.where(first + n[None, :] <= position[:, None], logits, float("-inf"))
        where = logits_ptr + pair * G * W * T + row.to(tl.int64)[:, None] * T + first + n[None, :]
        tl.store(where, logits, mask=valid[:, None] & (first + n[None, :] < T))


def dense_attention(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None,
    shape: QueryTile | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.dense_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens.

    Without a soft cap `scale` must be positive. Benchmarks vary the tiles, `shape`; None takes ours.
    """
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    check_int32(query_BHGWD.device, block_table=block_table_BP, length=length_B)
    B, H, G, W, D = query_BHGWD.shape
    page_size, E = key_PHND.shape[2], value_PHNE.shape[3]
    tile = tile_shape(key_PHND, value_PHNE, page_size, target(query_BHGWD.device))
    out_BHGWE = query_BHGWD.new_empty(B, H, G, W, E)
    shape = shape or prompt_tile(query_BHGWD, tile, target(query_BHGWD.device))
    launch(
        _dense_attention_kernel, (triton.cdiv(G * W, shape.rows), H, B),
        query_BHGWD.contiguous(), key_PHND, value_PHNE, block_table_BP, length_B,
        length_B if sink_HG is None else sink_HG.float().contiguous(), out_BHGWE,
        scale, soft_cap or 1.0, W, block_table_BP.shape[1],
        KEY_STRIDES=kernel_strides(key_PHND, "key"), VALUE_STRIDES=kernel_strides(value_PHNE, "value"),
        H=H, G=G, D=D, E=E, PAGE=page_size, BLOCK_M=shape.rows, BLOCK_N=shape.tokens,
        BLOCK_D=tile.key_width, BLOCK_E=tile.value_width,
        CAPPED=soft_cap is not None, SINKS=sink_HG is not None,
        num_warps=shape.warps, num_stages=shape.stages, max_registers=shape.registers,
    )  # fmt: skip
    return out_BHGWE


def window_logits(
    query_BHGWD: torch.Tensor, key_PHND: torch.Tensor, block_table_BP: torch.Tensor,
    length_B: torch.Tensor, *, scale: float, soft_cap: float | None = None,
    longest: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.window_logits`."""
    check(query_BHGWD, key_PHND, block_table_BP, length_B)
    check_int32(query_BHGWD.device, block_table=block_table_BP, length=length_B)
    B, H, G, W, D = query_BHGWD.shape
    page_size, T = key_PHND.shape[2], int(length_B.max()) if longest is None else longest
    tile = tile_shape(key_PHND, key_PHND, page_size, target(query_BHGWD.device))
    logits_BHGWT = query_BHGWD.new_empty(B, H, G, W, T, dtype=torch.float32)
    shape = prompt_tile(query_BHGWD, tile, target(query_BHGWD.device), window=True)
    launch(
        _window_logits_kernel, (triton.cdiv(T, CHUNK), triton.cdiv(G * W, shape.rows), B * H),
        query_BHGWD.contiguous(), key_PHND, block_table_BP, length_B, logits_BHGWT,
        scale, soft_cap or 1.0, W, T, block_table_BP.shape[1],
        KEY_STRIDES=kernel_strides(key_PHND, "key"),
        H=H, G=G, D=D, PAGE=page_size, SPAN=CHUNK, BLOCK_M=shape.rows, BLOCK_N=shape.tokens,
        BLOCK_D=tile.key_width, CAPPED=soft_cap is not None,
        num_warps=shape.warps, num_stages=shape.stages, max_registers=shape.registers,
    )  # fmt: skip
    return logits_BHGWT
