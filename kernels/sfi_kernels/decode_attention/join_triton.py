"""The join kernel: partial outputs by log-sum-exp, and the evidence's sums over J."""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import LOG2E, add_sum, add_terms, finish, log_sum

WORDS, EVIDENCE = tl.constexpr(words.WORDS), tl.constexpr(words.EVIDENCE)
FIRST, SPLITS = tl.constexpr(words.FIRST), tl.constexpr(words.SPLITS)


@triton.jit
def _join_splits_kernel(
    table_ptr,
    sink_ptr,
    pseudo_logit_ptr,
    pseudo_value_ptr,
    out_ptr,
    part_ptr,
    lse_ptr,
    sums_ptr,
    log_sum_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SINKS: tl.constexpr,
    PSEUDO: tl.constexpr,
    SLOW: tl.constexpr,
):
    request, h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = table_ptr + request * WORDS
    first, splits = tl.load(row + FIRST).to(tl.int64), tl.load(row + SPLITS)
    g, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    if SLOW:
        evidence = tl.load(row + EVIDENCE).to(tl.int64)
        if evidence >= 0:
            peak_J = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total_J = tl.zeros([BLOCK_M], tl.float32)
            for split in range(splits):
                own_row = ((first + split) * H + h) * G + g
                part = tl.load(sums_ptr + own_row, mask=g < G, other=float("-inf"))
                peak_J, total_J = add_sum(peak_J, total_J, part[:, None])
            sum_J = log_sum(peak_J, total_J)
            tl.store(log_sum_ptr + (evidence * H + h) * G + g, sum_J, mask=g < G)
    if splits == 1:  # the split kernel has written the output
        return
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    mask = (g[:, None] < G) & (e[None, :] < E)
    for split in range(splits):
        own_row = ((first + split) * H + h) * G + g
        lse = tl.load(lse_ptr + own_row, mask=g < G, other=float("-inf"))
        part = tl.load(part_ptr + own_row[:, None] * E + e[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, lse)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, weight = tl.exp2((peak - base) * LOG2E), tl.exp2((lse - base) * LOG2E)
        total = total * decay + weight
        out = out * decay[:, None] + part * weight[:, None]
        peak = new_peak
    out, lse = finish(peak, total, out)
    pair = request * H + h
    out = add_terms(
        out, lse, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, pair, h, g,
        G, E, BLOCK_E, SINKS, PSEUDO,
    )  # fmt: skip
    where = (pair * G + g[:, None]) * E + e[None, :]
    tl.store(out_ptr + where, out.to(out_ptr.dtype.element_ty), mask=mask)
