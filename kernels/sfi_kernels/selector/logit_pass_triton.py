"""From logits to the power mean: Eqs. 6 and 7."""

import triton
import triton.language as tl

from sfi_kernels.selector.chunks_triton import (
    EVIDENCE_PEAK,
    LAST,
    NEGATIVE_FIRST,
    NOTHING,
    finite,
    load_chunks,
)


@triton.jit
def _load_logit(logits_ptr, allowed_ptr, t, inside, T, SPAN: tl.constexpr):
    """Load a query's logits, the best of `SPAN` neighbors in J on each side; -inf outside J."""
    if SPAN == 0:
        return tl.load(logits_ptr + t, mask=inside, other=NOTHING).to(tl.float32)
    best = tl.full(t.shape, NOTHING, tl.float32)
    for shift in range(-SPAN, SPAN + 1):
        near = t + shift
        gives = inside & (near >= 0) & (near < T)
        gives = gives & tl.load(allowed_ptr + near, mask=gives, other=False)
        logit = tl.load(logits_ptr + near, mask=gives, other=NOTHING).to(tl.float32)
        best = tl.maximum(best, logit)
    return best


@triton.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "group_stride", "query_stride", "allowed_stride",
        "H", "W", "T", "length",
    ]
)  # fmt: skip
def _selector_row_kernel(
    logits_ptr, allowed_ptr, row_ptr,
    batch_stride, head_stride, group_stride, query_stride, allowed_stride, H, W, T, length,
    G: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, chunks = tl.num_programs(0).to(tl.int64), tl.num_programs(1)
    batch = row // (W * G * H)
    logits_ptr += batch * batch_stride + row // (W * G) % H * head_stride
    logits_ptr += row // W % G * group_stride + row % W * query_stride
    allowed_ptr += batch * allowed_stride
    peak, total = float("-inf"), 0.0
    for start in range(chunk * length, tl.minimum(chunk * length + length, T), BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = tl.load(allowed_ptr + t, mask=t < T, other=False)
        logit = _load_logit(logits_ptr, allowed_ptr, t, inside, T, SPAN)  # [BLOCK]
        new_peak = tl.maximum(peak, tl.max(logit, 0))
        base = finite(new_peak)
        total = total * tl.exp(peak - base) + tl.sum(tl.exp(logit - base), 0)
        peak = new_peak
    row_ptr += row * chunks + chunk
    tl.store(row_ptr, peak)
    tl.store(row_ptr + rows * chunks, total)


@triton.jit(do_not_specialize=["chunks"])
def _selector_log_sum_kernel(row_ptr, log_sum_ptr, chunks, CHUNKS: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    row_ptr += row * chunks
    peak = load_chunks(row_ptr, chunks, NOTHING, CHUNKS)  # [CHUNKS]
    total = load_chunks(row_ptr + rows * chunks, chunks, 0.0, CHUNKS)
    base = finite(tl.max(peak, 0))
    whole = tl.sum(total * tl.exp(peak - base), 0)
    # a query that sees nothing of J has logits of -inf, whatever is subtracted
    tl.store(log_sum_ptr + row, base + tl.log(tl.where(whole > 0, whole, 1.0)))


@triton.jit
def _power_mean(
    logits_ptr, log_sum_ptr, allowed_ptr, t, inside, group_stride, query_stride, W, T, alpha,
    G: tl.constexpr, REDUCE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    mean = tl.zeros(t.shape, tl.float32)
    for w in range(W):
        share = tl.zeros(t.shape, tl.float32)
        for g in tl.static_range(G):
            query_ptr = logits_ptr + g * group_stride + w * query_stride
            logit = _load_logit(query_ptr, allowed_ptr, t, inside, T, SPAN)
            # Eq. 6
            log_p = logit - finite(tl.load(log_sum_ptr + g * W + w))
            if REDUCE == "power":
                share += tl.exp(alpha * log_p)
            elif REDUCE == "mean":
                share += tl.exp(log_p) / G
            else:
                share = tl.maximum(share, tl.exp(log_p))
        if REDUCE != "power":
            power = tl.exp2(alpha * tl.log2(tl.where(share > 0, share, 1.0)))
            share = tl.where(share > 0, power, 0.0)
        mean += share
    # Eq. 7
    if REDUCE == "power":
        return mean / (G * W)
    return mean / W


@triton.jit(
    do_not_specialize=[
        "batch_stride", "head_stride", "group_stride", "query_stride", "allowed_stride",
        "H", "W", "T", "length",
    ]
)  # fmt: skip
def _selector_mean_kernel(
    logits_ptr, log_sum_ptr, allowed_ptr, mean_ptr, partial_ptr,
    batch_stride, head_stride, group_stride, query_stride, allowed_stride, H, W, T, length, alpha,
    G: tl.constexpr, REDUCE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, chunks = tl.num_programs(0).to(tl.int64), tl.num_programs(1)
    logits_ptr += row // H * batch_stride + row % H * head_stride
    log_sum_ptr += row * G * W
    allowed_ptr += row // H * allowed_stride
    mean_ptr += row * T
    peak = tl.zeros([BLOCK], tl.float32)
    first = tl.zeros([BLOCK], tl.int32) + T
    last = tl.full([BLOCK], -1, tl.int32)
    for start in range(chunk * length, tl.minimum(chunk * length + length, T), BLOCK):
        t = start + tl.arange(0, BLOCK)
        inside = tl.load(allowed_ptr + t, mask=t < T, other=False)
        mean = _power_mean(
            logits_ptr, log_sum_ptr, allowed_ptr, t, inside, group_stride, query_stride, W, T, alpha,
            G, REDUCE, SPAN,
        )  # fmt: skip
        tl.store(mean_ptr + t, mean, mask=t < T)
        peak = tl.maximum(peak, mean)
        first = tl.minimum(first, tl.where(inside, t, T))
        last = tl.maximum(last, tl.where(inside, t, -1))
    partial_ptr += row * chunks + chunk
    tl.store(partial_ptr + EVIDENCE_PEAK * rows * chunks, tl.max(peak, 0))
    tl.store(partial_ptr + NEGATIVE_FIRST * rows * chunks, -tl.min(first, 0).to(tl.float32))
    tl.store(partial_ptr + LAST * rows * chunks, tl.max(last, 0).to(tl.float32))
