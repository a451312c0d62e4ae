"""Top-K in Triton: an exact radix select in five launches, none of which waits for another program.

A score's key is an int32 of the same order. Four launches narrow the K-th best key by 8 bits each: a program finds the
digit that the launch before settled, and counts the next digit of the keys that still match into a histogram of the
row. Nothing is zeroed beforehand: in the first launch each chunk has its own histogram, and the first chunk's program
zeroes those of the next launches. The fourth launch also counts how many positions each chunk takes; the fifth writes
them. Every launch reads every score once; counts are integers, so the order of programs does not matter.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from sfi_kernels.constants import MASKED_SCORE
from sfi_kernels.launch import KernelLimitError, launch
from sfi_kernels.top_k.reference import check

LIMIT = tl.constexpr(MASKED_SCORE / 2)
# below the key of every score, -inf included; also that of places past the row's end, which changes nothing:
# no more than T positions are asked for
MASKED_KEY = tl.constexpr(-(2**31))
CHUNK = tl.constexpr(4096)
BINS = tl.constexpr(256)
COLUMNS = tl.constexpr(257)  # counts of keys at or above each digit, then of those above all of them
PASSES = tl.constexpr(4)
WARPS = 8
MIN_CHUNKS = 64  # one kernel for all rows of up to 256K positions
ADDED = tl.constexpr(16)  # chunks whose histograms are added up at a time
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _load_keys(row_ptr, t, T):
    score = tl.load(row_ptr + t, mask=t < T, other=float("-inf")).to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    # two's complement of sign and magnitude; -0 becomes 0
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return tl.where(score > LIMIT, key, MASKED_KEY)  # [CHUNK]


@triton.jit
def _narrow(counts_ptr, state_ptr, chunk_ptr, chunks, budget, PASS: tl.constexpr):
    """Return the threshold's first PASS digits, and how many keys with these digits to take."""
    if PASS == 0:
        return 0, budget
    digit = tl.arange(0, BINS)
    if PASS == 1:  # the first launch counted by chunk
        prefix, room = 0, budget
        added = tl.zeros([ADDED, BINS], tl.int32)
        for first in range(0, chunks, ADDED):
            chunk = first + tl.arange(0, ADDED)[:, None]
            added += tl.load(chunk_ptr + chunk * COLUMNS + digit[None, :], mask=chunk < chunks, other=0)
        counts = tl.sum(added, 0)
    else:
        prefix = tl.load(state_ptr + 2 * (PASS - 1))
        room = tl.load(state_ptr + 2 * (PASS - 1) + 1)
        counts = tl.load(counts_ptr + (PASS - 1) * BINS + digit)
    above_or_equal = tl.cumsum(counts, reverse=True)
    pivot = tl.sum((above_or_equal >= room).to(tl.int32)) - 1
    room -= tl.sum(tl.where(digit > pivot, counts, 0))
    # the first digit holds the sign
    prefix = pivot - 128 if PASS == 1 else prefix * 256 + pivot
    return prefix, room


@triton.jit(do_not_specialize=["H", "T", "budget", "batch_stride", "head_stride"])
def _top_k_count_kernel(
    score_ptr, counts_ptr, state_ptr, chunk_ptr, H, T, budget, batch_stride, head_stride, PASS: tl.constexpr
):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    score_ptr += row // H * batch_stride + row % H * head_stride
    counts_ptr += row * PASSES * BINS
    state_ptr += row * PASSES * 2
    chunk_ptr += row * chunks * COLUMNS
    prefix, room = _narrow(counts_ptr, state_ptr, chunk_ptr, chunks, budget, PASS)
    if PASS > 0 and chunk == 0:  # read by the next launch only
        tl.store(state_ptr + 2 * PASS, prefix)
        tl.store(state_ptr + 2 * PASS + 1, room)

    t = chunk * CHUNK + tl.arange(0, CHUNK)
    key = _load_keys(score_ptr, t, T)
    shift: tl.constexpr = 24 - 8 * PASS
    digit = (key >> shift) & 255
    bins = tl.arange(0, BINS)
    chunk_ptr += chunk * COLUMNS
    if PASS == 0:
        tl.store(chunk_ptr + bins, tl.histogram(digit ^ 128, BINS))
        if chunk == 0:
            for later in tl.static_range(1, PASSES):
                tl.store(counts_ptr + later * BINS + bins, 0)
    else:  # not compiled for pass 0, where Triton would warn of a shift by 32
        counts = tl.histogram(digit, BINS, mask=(key >> (shift + 8)) == prefix)
        tl.atomic_add(counts_ptr + PASS * BINS + bins, counts, mask=counts > 0, sem="relaxed")
        if PASS == PASSES - 1:
            above = tl.sum((key >> 8 > prefix).to(tl.int32))
            tl.store(chunk_ptr + bins, above + tl.cumsum(counts, reverse=True))
            tl.store(chunk_ptr + BINS, above)


@triton.jit(do_not_specialize=["H", "T", "budget", "batch_stride", "head_stride"])
def _top_k_write_kernel(
    score_ptr, counts_ptr, state_ptr, chunk_ptr, index_ptr, H, T, budget, batch_stride, head_stride,
    BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    score_ptr += row // H * batch_stride + row % H * head_stride
    index_ptr += row * budget
    chunk_ptr += row * chunks * COLUMNS
    counts_ptr += row * PASSES * BINS
    state_ptr += row * PASSES * 2
    threshold, room = _narrow(counts_ptr, state_ptr, chunk_ptr, chunks, budget, PASSES)

    # keys above the threshold and equal to it in the chunks before this one
    other = tl.arange(0, BLOCK_CHUNKS)
    column_ptr = chunk_ptr + other * COLUMNS + (threshold & 255)
    above = tl.sum(tl.load(column_ptr + 1, mask=other < chunk, other=0))
    equal = tl.sum(tl.load(column_ptr, mask=other < chunk, other=0)) - above

    # Eq. 24
    t = chunk * CHUNK + tl.arange(0, CHUNK)
    key = _load_keys(score_ptr, t, T)
    best, tied = key > threshold, key == threshold
    # both counts in one scan, of 16 bits each
    each = best.to(tl.int32) + tied.to(tl.int32) * 65536
    before = tl.cumsum(each) - each
    above += before & 65535
    equal += before >> 16
    if threshold == MASKED_KEY:  # fewer positions are allowed than asked for
        total = budget - room
        tl.store(index_ptr + t, -1, mask=(t >= total) & (t < budget))
        room = 0
    taken = best | (tied & (equal < room))
    tl.store(index_ptr + above + tl.minimum(equal, room), t, mask=taken)


def top_k(score_BHT: torch.Tensor, budget: int) -> torch.Tensor:
    """See `reference.top_k`. Half precision is ranked as float32; float64 is refused."""
    check(score_BHT, budget)
    if score_BHT.dtype not in DTYPES:
        raise KernelLimitError(
            f"score must be float32, float16 or bfloat16 for the kernel, got {score_BHT.dtype}; use the torch backend"
        )
    if score_BHT.stride(2) != 1:
        score_BHT = score_BHT.contiguous()
    B, H, T = score_BHT.shape
    K, rows, chunks = min(budget, T), B * H, triton.cdiv(T, CHUNK.value)
    empty = partial(torch.empty, dtype=torch.int32, device=score_BHT.device)
    index_BHK, grid, sizes = empty(B, H, K), (rows, chunks), (H, T, K, *score_BHT.stride()[:2])
    counts, state = empty(rows, PASSES.value, BINS.value), empty(rows, PASSES.value, 2)
    scratch = counts, state, empty(rows, chunks, COLUMNS.value)
    for step in range(PASSES.value):
        launch(_top_k_count_kernel, grid, score_BHT, *scratch, *sizes, num_warps=WARPS, PASS=step)
    launch(
        _top_k_write_kernel, grid, score_BHT, *scratch, index_BHK, *sizes,
        num_warps=WARPS, BLOCK_CHUNKS=max(MIN_CHUNKS, triton.next_power_of_2(chunks)),
    )  # fmt: skip
    return index_BHK
