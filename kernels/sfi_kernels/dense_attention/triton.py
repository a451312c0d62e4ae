"""Dense attention of several queries in Triton, for prompts and for verifying drafts, and their logits.

The rows of a tile are the G query heads of neighboring queries, so that a tile of keys serves them all.
"""

import torch
import triton
import triton.language as tl

from sfi_kernels.attention_tile.shape import padded, tile_shape
from sfi_kernels.attention_tile.triton import add_sink, add_tile, finish, rows, scaled_logits
from sfi_kernels.dense_attention.reference import check
from sfi_kernels.launch import launch, target
from sfi_kernels.shapes import check_int32

ROWS = 64  # of a tile of queries
FLOAT32_NUMBERS = 4096  # of a tile of queries in float32, whose products run in registers
WARPS = 8  # with four some shapes would spill
REGISTERS = 255  # of a thread: left alone, the compiler spills for more programs a processor
PAGE_IDS = 128  # page numbers a program holds at once
CHUNK = 512  # keys of a program that writes logits


@triton.jit
def page_of(
    block_table_ptr, place, slot, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, pages_per_request
):
    """Load the page numbers of the tiles from `place` on, one for each `slot`."""
    page_slot = (place + slot * BLOCK_N) // PAGE
    return tl.load(block_table_ptr + page_slot, mask=page_slot < pages_per_request, other=0)


@triton.jit(do_not_specialize=["W", "pages_per_request"])
def _dense_attention_kernel(
    query_ptr, key_ptr, value_ptr, block_table_ptr, length_ptr, sink_ptr, out_ptr,
    scale, soft_cap, W, pages_per_request,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    IDS: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    h, request = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    # the longest tiles of a causal prompt first
    row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    w, g, own = row // G, row % G, row < W * G
    length = tl.load(length_ptr + request)
    position = tl.where(own, length - W + w, -1)
    base = (request * H + h) * G * W
    head_row = g * W + w
    query = rows(query_ptr + base * D, head_row, D, own, D, BLOCK_D)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    n, slot = tl.arange(0, BLOCK_N), tl.arange(0, IDS)
    stop = tl.max(position) + 1
    table = block_table_ptr + request * pages_per_request
    for begin in range(0, stop, IDS * BLOCK_N):
        pages = page_of(table, begin, slot, BLOCK_N, PAGE, pages_per_request)
        for first in range(begin, tl.minimum(stop, begin + IDS * BLOCK_N), BLOCK_N):
            page = tl.sum(tl.where(slot * BLOCK_N == first - begin, pages, 0)).to(tl.int64)
            page_row = (page * H + h) * PAGE + first % PAGE
            valid = first + n < stop
            key = rows(key_ptr + page_row * D, n, D, valid, D, BLOCK_D)
            value = rows(value_ptr + page_row * E, n, E, valid, E, BLOCK_E)
            logits = scaled_logits(query, key, scale, soft_cap, CAPPED)
            seen = first + n[None, :] <= position[:, None]
            logits = tl.where(seen, logits, float("-inf"))
            peak, total, out = add_tile(peak, total, out, logits, value)
    out, lse = finish(peak, total, out)
    if SINKS:
        out = add_sink(out, lse, tl.load(sink_ptr + h * G + g))
    e = tl.arange(0, BLOCK_E)
    tl.store(
        out_ptr + base * E + head_row[:, None] * E + e[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=own[:, None] & (e[None, :] < E),
    )


@triton.jit(do_not_specialize=["W", "T", "pages_per_request"])
def _window_logits_kernel(
    query_ptr, key_ptr, block_table_ptr, length_ptr, logits_ptr,
    scale, soft_cap, W, T, pages_per_request,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, IDS: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(2).to(tl.int64)  # request and KV head
    request, h = pair // H, pair % H
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = row < G * W
    length = tl.load(length_ptr + request)
    position = tl.where(own, length - W + row % W, -1)
    query = rows(query_ptr + pair * G * W * D, row, D, own, D, BLOCK_D)
    n, slot = tl.arange(0, BLOCK_N), tl.arange(0, IDS)
    begin = tl.program_id(0) * IDS * BLOCK_N
    pages = page_of(
        block_table_ptr + request * pages_per_request, begin, slot, BLOCK_N, PAGE, pages_per_request
    )
    for first in range(begin, tl.minimum(T, begin + IDS * BLOCK_N), BLOCK_N):
        page = tl.sum(tl.where(slot * BLOCK_N == first - begin, pages, 0)).to(tl.int64)
        page_row = (page * H + h) * PAGE + first % PAGE
        key = rows(key_ptr + page_row * D, n, D, first + n < length, D, BLOCK_D)
        # Eq. 4
        logits = scaled_logits(query, key, scale, soft_cap, CAPPED)
        seen = first + n[None, :] <= position[:, None]
        tl.store(
            logits_ptr + pair * G * W * T + row.to(tl.int64)[:, None] * T + first + n[None, :],
            tl.where(seen, logits, float("-inf")),
            mask=own[:, None] & (first + n[None, :] < T),
        )


def dense_attention(
    query_BHGWD: torch.Tensor,
    key_PHND: torch.Tensor,
    value_PHNE: torch.Tensor,
    block_table_BP: torch.Tensor,
    length_B: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    sink_HG: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `reference.dense_attention`. Heads of at most 256 numbers, pages of multiples of 16 tokens."""
    check(query_BHGWD, key_PHND, block_table_BP, length_B, value_PHNE, sink_HG)
    check_int32(query_BHGWD.device, block_table=block_table_BP, length=length_B)
    B, H, G, W, D = query_BHGWD.shape
    page_size, E = key_PHND.shape[2], value_PHNE.shape[3]
    tile = tile_shape(key_PHND, value_PHNE, page_size, target(query_BHGWD.device))
    out_BHGWE = query_BHGWD.new_empty(B, H, G, W, E)
    block_m = _block_m(query_BHGWD)
    launch(
        _dense_attention_kernel, (triton.cdiv(G * W, block_m), H, B),
        query_BHGWD.contiguous(), key_PHND, value_PHNE, block_table_BP, length_B,
        length_B if sink_HG is None else sink_HG.float().contiguous(), out_BHGWE,
        scale, soft_cap or 1.0, W, block_table_BP.shape[1],
        H=H, G=G, D=D, E=E, PAGE=page_size, BLOCK_M=block_m, BLOCK_N=tile.tokens,
        BLOCK_D=tile.key_width, BLOCK_E=tile.value_width, IDS=PAGE_IDS,
        CAPPED=soft_cap is not None, SINKS=sink_HG is not None,
        num_warps=WARPS, num_stages=tile.prompt_stages, max_registers=REGISTERS,
    )  # fmt: skip
    return out_BHGWE


def window_logits(
    query_BHGWD: torch.Tensor,
    key_PHND: torch.Tensor,
    block_table_BP: torch.Tensor,
    length_B: torch.Tensor,
    *,
    scale: float,
    soft_cap: float | None = None,
    longest: int | None = None,
) -> torch.Tensor:
    """See `reference.window_logits`."""
    check(query_BHGWD, key_PHND, block_table_BP, length_B)
    check_int32(query_BHGWD.device, block_table=block_table_BP, length=length_B)
    B, H, G, W, D = query_BHGWD.shape
    page_size, T = key_PHND.shape[2], int(length_B.max()) if longest is None else longest
    tile = tile_shape(key_PHND, key_PHND, page_size, target(query_BHGWD.device))
    logits_BHGWT = query_BHGWD.new_empty(B, H, G, W, T, dtype=torch.float32)
    block_m, ids = _block_m(query_BHGWD), CHUNK // tile.tokens
    launch(
        _window_logits_kernel, (triton.cdiv(T, CHUNK), triton.cdiv(G * W, block_m), B * H),
        query_BHGWD.contiguous(), key_PHND, block_table_BP, length_B, logits_BHGWT,
        scale, soft_cap or 1.0, W, T, block_table_BP.shape[1],
        H=H, G=G, D=D, PAGE=page_size, BLOCK_M=block_m, BLOCK_N=tile.tokens,
        BLOCK_D=tile.key_width, IDS=ids, CAPPED=soft_cap is not None,
        num_warps=WARPS, num_stages=tile.prompt_stages, max_registers=REGISTERS,
    )  # fmt: skip
    return logits_BHGWT


def _block_m(query_BHGWD: torch.Tensor) -> int:
    _, _, G, W, D = query_BHGWD.shape
    most = ROWS
    if query_BHGWD.dtype == torch.float32:
        most = min(ROWS // 2, FLOAT32_NUMBERS // padded(D))
    return min(most, padded(G * W))
