"""The second and the third launch: score the keys of J and count the scores, then take the best.

A score has 8 bits (`reference.coarse_score`), so that one histogram finds the threshold. Both launches
read the logits that the first launch left.
"""

import triton
import triton.language as tl

from sfi_kernels import step_descriptor as words
from sfi_kernels.attention_tile.triton import LN2, LOG2E, add_sum, log_sum
from sfi_kernels.code_scan import codes
from sfi_kernels.code_scan.sums_triton import candidates, logits_at

FAST, SINK = tl.constexpr(words.FAST), tl.constexpr(words.SINK)
DROPPED, LOWEST = tl.constexpr(codes.DROPPED), tl.constexpr(codes.LOWEST)
BINS = tl.constexpr(256)
# counts of scores at or above each one, then 0
COLUMNS = tl.constexpr(257)
JOINED = tl.constexpr(64)  # chunks whose sums are joined at a time


@triton.jit
def _joined_sums(lse_ptr, g, first_chunk, stop_chunk, G: tl.constexpr, BLOCK_G: tl.constexpr):
    """Join the chunks' log-sum-exps, [BLOCK_G]."""
    peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for begin in range(first_chunk, stop_chunk, JOINED):
        chunk = begin + tl.arange(0, JOINED)
        mask = (g < G)[:, None] & (chunk < stop_chunk)[None, :]
        part = tl.load(lse_ptr + chunk[None, :] * G + g[:, None], mask=mask, other=float("-inf"))
        peak, total = add_sum(peak, total, part)
    return log_sum(peak, total)


@triton.jit(do_not_specialize=["capacity", "budget"])
def _code_scan_score_kernel(
    table_ptr, logit_ptr, lse_ptr, counts_ptr, chunk_ptr, score_ptr, log_sum_ptr,
    capacity, budget, H: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pair, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    mode, first, stop = candidates(table_ptr, pair // H)
    begin = chunk * CHUNK
    if (mode != FAST) | (stop - first <= budget) | (begin >= stop) | (begin + CHUNK <= first):
        return
    g, t = tl.arange(0, BLOCK_G), begin + tl.arange(0, CHUNK)
    own = (t >= first) & (t < stop)
    lse_ptr += pair * chunks * G
    lse = _joined_sums(lse_ptr, g, first // CHUNK, tl.cdiv(stop, CHUNK), G, BLOCK_G)
    tl.store(log_sum_ptr + pair * G + g, lse, mask=g < tl.where(chunk == first // CHUNK, G, 0))
    at, mask = logits_at(pair, g, t, own, capacity, G)
    logits = tl.load(logit_ptr + at, mask=mask, other=0.0)
    weight = tl.exp2((logits - lse[:, None]) * LOG2E)
    mean = tl.sum(tl.where((g < G)[:, None], weight, 0.0), 0) / G
    score = (mean.to(tl.int32, bitcast=True) >> DROPPED) - LOWEST
    score = tl.minimum(tl.maximum(score, 0), BINS - 1)
    tl.store(score_ptr + pair * capacity + t, score.to(tl.uint8), mask=own)
    counts, bins = tl.histogram(score, BINS, mask=own), tl.arange(0, BINS)
    chunk_ptr += (pair * chunks + chunk) * COLUMNS
    tl.store(chunk_ptr + bins, tl.cumsum(counts, reverse=True))
    tl.store(chunk_ptr + BINS, 0)
    tl.atomic_add(counts_ptr + pair * BINS + bins, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _write_ends(index_ptr, position_ptr, length_ptr, first, count, budget, S, CHUNK: tl.constexpr):
    """Write sinks, padding and the number of positions."""
    taken = tl.minimum(tl.maximum(count, 0), budget)
    for begin in range(0, S, CHUNK):
        s = begin + tl.arange(0, CHUNK)
        tl.store(position_ptr + s, s, mask=(s < first) & (s < S))
        tl.store(position_ptr + s, -1, mask=(s >= first + taken) & (s < S))
        tl.store(index_ptr + s, -1, mask=(s >= taken) & (s < budget))
    tl.store(length_ptr, first + taken)


@triton.jit(do_not_specialize=["capacity", "budget", "S"])
def _code_scan_choose_kernel(
    table_ptr, logit_ptr, lse_ptr, counts_ptr, chunk_ptr, score_ptr, log_sum_ptr, index_ptr,
    position_ptr, length_ptr, rest_ptr, capacity, budget, S, rest, H: tl.constexpr, G: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    pair, chunk, chunks = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.num_programs(0)
    mode, first, stop = candidates(table_ptr, pair // H)
    g, begin, count = tl.arange(0, BLOCK_G), chunk * CHUNK, stop - first
    index_ptr += pair * budget
    position_ptr += pair * S
    rest_ptr += (pair * G + g) * chunks + chunk
    if (mode == FAST) & (chunk == 0):
        _write_ends(index_ptr, position_ptr, length_ptr + pair, first, count, budget, S, CHUNK)
    if (mode != FAST) | (count <= budget) | (begin >= stop) | (begin + CHUNK <= first):
        tl.store(rest_ptr, float("-inf"), mask=g < G)
    if (mode != FAST) | (begin >= stop) | (begin + CHUNK <= first):
        return
    t = begin + tl.arange(0, CHUNK)
    own = (t >= first) & (t < stop)
    if count <= budget:
        tl.store(index_ptr + t - first, t, mask=own)
        tl.store(position_ptr + t, t, mask=own)
        return
    bins = tl.arange(0, BINS)
    counts = tl.load(counts_ptr + pair * BINS + bins)
    pivot = tl.sum((tl.cumsum(counts, reverse=True) >= budget).to(tl.int32)) - 1
    room = budget - tl.sum(tl.where(bins > pivot, counts, 0))
    # scores above the threshold and equal to it in the chunks before this one
    other = tl.arange(0, BLOCK_CHUNKS)
    before = (other >= first // CHUNK) & (other < chunk)
    column_ptr = chunk_ptr + (pair * chunks + other) * COLUMNS + pivot
    above = tl.sum(tl.load(column_ptr + 1, mask=before, other=0))
    equal = tl.sum(tl.load(column_ptr, mask=before, other=0)) - above
    # Eq. 24
    score = tl.load(score_ptr + pair * capacity + t, mask=own, other=0).to(tl.int32)
    best, tied = own & (score > pivot), own & (score == pivot)
    # both counts in one scan, of 16 bits each
    each = best.to(tl.int32) + tied.to(tl.int32) * 65536
    ahead = tl.cumsum(each) - each
    taken = best | (tied & (equal + (ahead >> 16) < room))
    rank = above + (ahead & 65535) + tl.minimum(equal + (ahead >> 16), room)
    tl.store(index_ptr + rank, t, mask=taken)
    tl.store(position_ptr + first + rank, t, mask=taken)
    lse = tl.load(log_sum_ptr + pair * G + g, mask=g < G, other=0.0)
    part = tl.load(lse_ptr + (pair * chunks + chunk) * G + g, mask=g < G, other=float("-inf"))
    at, mask = logits_at(pair, g, t, taken, capacity, G)
    logits = tl.load(logit_ptr + at, mask=mask, other=float("-inf"))
    unread = tl.exp2((part - lse) * LOG2E) - tl.sum(tl.exp2((logits - lse[:, None]) * LOG2E), 1)
    unread *= rest
    logit = tl.where(unread > 0.0, lse + tl.log2(tl.where(unread > 0.0, unread, 1.0)) * LN2, float("-inf"))
    tl.store(rest_ptr, logit, mask=g < G)
