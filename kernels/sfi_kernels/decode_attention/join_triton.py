"""The join kernel: merge the splits' outputs by log-sum-exp, and sum the evidence over J.

A program joins the splits of one query. It loads a tile of splits at once: thirty splits wait for memory as
often as two.
"""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import LOG2E, add_sum, add_terms, finish, log_sum
from sfi_kernels.decode_attention.split_triton import QUERIES

WORDS, EVIDENCE = tl.constexpr(words.WORDS), tl.constexpr(words.EVIDENCE)
FIRST, SPLITS = tl.constexpr(words.FIRST), tl.constexpr(words.SPLITS)


@triton.jit
def _join_sums(sums_ptr, head_row, stride, splits, TILE: tl.constexpr):
    """Return the log-sum-exp over J of one query head, [1]."""
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for begin in range(0, splits, TILE):
        split = begin + tl.arange(0, TILE)
        own_row = head_row + split * stride
        part = tl.load(sums_ptr + own_row, mask=split < splits, other=float("-inf"))
        peak, total = add_sum(peak, total, part[None, :])
    return log_sum(peak, total)


@triton.jit(do_not_specialize=["W", "pseudo_parts"])
def _join_splits_kernel(
    table_ptr, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, out_ptr, part_ptr, lse_ptr, sums_ptr,
    log_sum_ptr, W, pseudo_parts, H: tl.constexpr, G: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, TILE: tl.constexpr, SINKS: tl.constexpr, PSEUDO: tl.constexpr,
    SLOW: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    request, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, place_GW = table_ptr + request * WORDS, tl.program_id(2)
    hands_out, size_GW, g = True, G, place_GW + tl.arange(0, 1)
    if SEVERAL:
        queries, w = tl.load(row + QUERIES), place_GW % W
        if w < W - queries:  # padding, whose output is zero already
            return
        hands_out = w == W - 1
        size_GW, g = G * W, g // W
    first, splits = tl.load(row + FIRST).to(tl.int64), tl.load(row + SPLITS)
    stride, head_row = H * size_GW, (first * H + h) * size_GW + place_GW
    if SLOW:
        evidence = tl.load(row + EVIDENCE).to(tl.int64)
        if (evidence >= 0) & hands_out:
            sum_J = _join_sums(sums_ptr, head_row, stride, splits, TILE)
            tl.store(log_sum_ptr + (evidence * H + h) * G + g, sum_J)
    if splits == 1:  # the split kernel has written the output
        return
    e = tl.arange(0, BLOCK_E)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, BLOCK_E], tl.float32)
    for begin in range(0, splits, TILE):
        split = begin + tl.arange(0, TILE)
        own_row = head_row + split * stride
        lse = tl.load(lse_ptr + own_row, mask=split < splits, other=float("-inf"))
        mask = (split < splits)[:, None] & (e[None, :] < E)
        part = tl.load(part_ptr + own_row[:, None] * E + e[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2((lse[None, :] - base[:, None]) * LOG2E)  # [1, TILE]
        decay = tl.exp2((peak - base) * LOG2E)
        total = total * decay + tl.sum(weight, 1)
        shares = tl.sum(part * tl.trans(weight), 0)
        out = out * decay[:, None] + shares[None, :]
        peak = new_peak
    out, lse = finish(peak, total, out)
    pair = request * H + h
    out = add_terms(
        out, lse, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, pseudo_parts, pair, h, g, G, E, BLOCK_E, SINKS, PSEUDO
    )
    where = (pair * size_GW + place_GW) * E + e[None, :]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=e[None, :] < E)
