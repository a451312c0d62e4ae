"""From logits to the power mean, Eqs. 6 and 7, and the partial results of the Selector's kernels.

A row of T positions, of one KV head, is cut into chunks, a program each, which writes to `partial` and `sums`,
[quantity, row, chunk]. The next launch merges a row's chunks, CHUNKS at a time: lane by lane, then the lanes. So empty
chunks change no bit, and a T that is only a bound gives the scores of the true T. `merged` is [quantity, row].
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))

# quantities of `partial`, float32; `merged` begins with the same
EVIDENCE_PEAK, NEGATIVE_FIRST, LAST, PRIOR_PEAK = (tl.constexpr(i) for i in range(4))
PARTIALS = 4
# the rest of `merged`, float32; the last four are |f|^2, f.r, |r|^2 and f's entropy
EVIDENCE_SCALE, PRIOR_SCALE, WEIGHT = (tl.constexpr(i) for i in range(4, 7))
NORM2, DOT, PRIOR_NORM2, ENTROPY = (tl.constexpr(i) for i in range(7, 11))
MERGED = 11
# quantities of `sums`, float64: f, r, f^2, f r, r^2, f log2(f), before normalization
F, R, FF, FR, RR, F_LOG_F = (tl.constexpr(i) for i in range(6))
SUMS = 6


@triton.jit
def finite(peak):
    """Replace a peak of -inf by 0, so that -inf less the peak is -inf and not NaN."""
    return tl.where(peak == NOTHING, 0.0, peak)


@triton.jit
def load_chunks(values_ptr, first, chunks, default, CHUNKS: tl.constexpr):
    """Load one quantity of CHUNKS of a row's chunks, from the chunk `first` on."""
    chunk = first + tl.arange(0, CHUNKS)
    return tl.load(values_ptr + chunk, mask=chunk < chunks, other=default)  # [CHUNKS]


@triton.jit
def merge_peak(values_ptr, chunks, CHUNKS: tl.constexpr):
    """Return the largest value of a row's chunks."""
    peak = tl.full([CHUNKS], NOTHING, tl.float32)
    for first in range(0, chunks, CHUNKS):
        peak = tl.maximum(peak, load_chunks(values_ptr, first, chunks, NOTHING, CHUNKS))
    return tl.max(peak, 0)


@triton.jit
def _load_allowed(allowed_ptr, start, T, SIZE: tl.constexpr):
    t = start + tl.arange(0, SIZE)
    return tl.load(allowed_ptr + t, mask=(t >= 0) & (t < T), other=False)


@triton.jit
def _load_logits(
    logits_ptr, start, inside, gives, LEVELS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Load a query's logits, the best of `SPAN` neighbors in J on each side; -inf outside J."""
    place = tl.arange(0, WIDE)
    best = tl.load(logits_ptr + start - SPAN + place, mask=gives, other=NOTHING).to(tl.float32)
    if SPAN == 0:
        return best
    # windows that double, each the maximum of two; the last two overlap
    for level in tl.static_range(LEVELS):
        best = tl.maximum(best, tl.gather(best, tl.minimum(place + 2**level, WIDE - 1), 0))
    first = tl.arange(0, BLOCK)
    last = first + 2 * SPAN + 1 - 2**LEVELS
    best = tl.maximum(tl.gather(best, first, 0), tl.gather(best, last, 0))
    return tl.where(inside, best, NOTHING)  # [BLOCK]


@triton.jit(
    do_not_specialize=["batch_stride", "head_stride", "group_stride", "query_stride", "allowed_stride", "H", "W", "T"]
)
def _selector_row_kernel(
    logits_ptr, allowed_ptr, row_ptr,
    batch_stride, head_stride, group_stride, query_stride, allowed_stride, H, W, T,
    G: tl.constexpr, LEVELS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, chunks = tl.num_programs(0).to(tl.int64), tl.num_programs(1)
    batch = row // (W * G * H)
    logits_ptr += batch * batch_stride + row // (W * G) % H * head_stride
    logits_ptr += row // W % G * group_stride + row % W * query_stride
    allowed_ptr += batch * allowed_stride
    inside = _load_allowed(allowed_ptr, chunk * BLOCK, T, BLOCK)
    gives = _load_allowed(allowed_ptr, chunk * BLOCK - SPAN, T, WIDE)
    logit = _load_logits(logits_ptr, chunk * BLOCK, inside, gives, LEVELS, SPAN, BLOCK, WIDE)
    peak = tl.max(logit, 0)
    total = tl.sum(tl.exp(logit - finite(peak)), 0)
    row_ptr += row * chunks + chunk
    tl.store(row_ptr, peak)
    tl.store(row_ptr + rows * chunks, total)


@triton.jit(do_not_specialize=["chunks"])
def _selector_log_sum_kernel(row_ptr, log_sum_ptr, chunks, CHUNKS: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    row_ptr += row * chunks
    base = finite(merge_peak(row_ptr, chunks, CHUNKS))
    totals = tl.zeros([CHUNKS], tl.float32)
    for first in range(0, chunks, CHUNKS):
        peak = load_chunks(row_ptr, first, chunks, NOTHING, CHUNKS)
        total = load_chunks(row_ptr + rows * chunks, first, chunks, 0.0, CHUNKS)
        totals += total * tl.exp(peak - base)
    whole = tl.sum(totals, 0)
    # a query that sees nothing of J has logits of -inf, whatever is subtracted
    tl.store(log_sum_ptr + row, base + tl.log(tl.where(whole > 0, whole, 1.0)))


@triton.jit(
    do_not_specialize=["batch_stride", "head_stride", "group_stride", "query_stride", "allowed_stride", "H", "W", "T"]
)
def _selector_mean_kernel(
    logits_ptr, log_sum_ptr, allowed_ptr, mean_ptr, partial_ptr,
    batch_stride, head_stride, group_stride, query_stride, allowed_stride, H, W, T, alpha,
    G: tl.constexpr, LEVELS: tl.constexpr, SPAN: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, chunks = tl.num_programs(0).to(tl.int64), tl.num_programs(1)
    logits_ptr += row // H * batch_stride + row % H * head_stride
    log_sum_ptr += row * G * W
    allowed_ptr += row // H * allowed_stride
    mean_ptr += row * T
    t = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = _load_allowed(allowed_ptr, chunk * BLOCK, T, BLOCK)
    gives = _load_allowed(allowed_ptr, chunk * BLOCK - SPAN, T, WIDE)
    mean = tl.zeros([BLOCK], tl.float32)
    for w in range(W):
        share = tl.zeros([BLOCK], tl.float32)
        for g in tl.static_range(G):
            query_ptr = logits_ptr + g * group_stride + w * query_stride
            logit = _load_logits(query_ptr, chunk * BLOCK, inside, gives, LEVELS, SPAN, BLOCK, WIDE)
            # Eq. 6
            log_p = logit - finite(tl.load(log_sum_ptr + g * W + w))
            share += tl.exp(alpha * log_p)
        mean += share
    # Eq. 7
    mean /= G * W
    tl.store(mean_ptr + t, mean, mask=t < T)
    first, last = tl.where(inside, t, T), tl.where(inside, t, -1)
    partial_ptr += row * chunks + chunk
    tl.store(partial_ptr + EVIDENCE_PEAK * rows * chunks, tl.max(mean, 0))
    tl.store(partial_ptr + NEGATIVE_FIRST * rows * chunks, -tl.min(first, 0).to(tl.float32))
    tl.store(partial_ptr + LAST * rows * chunks, tl.max(last, 0).to(tl.float32))
