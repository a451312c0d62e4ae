"""One tile of keys in an online softmax. Logits are natural; exponentials are powers of two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PARTS = tl.constexpr(32)  # of a pseudo token's logit, joined at a time


@triton.jit
def rows(pointer, row, width, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of `WIDTH` numbers, padded to `BLOCK`; row i begins at `pointer + row[i] * width`."""
    column = tl.arange(0, BLOCK)
    where = pointer + row[:, None] * width + column[None, :]
    if WIDTH == BLOCK:
        return tl.load(where, mask=mask[:, None], other=0.0)
    return tl.load(where, mask=mask[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def row_start(page, head, token, STRIDES: tl.constexpr):
    """Return where rows of pages begin; `STRIDES` are those of page, head and token."""
    # `token` may be a number of Python's, in the interpreter
    start = page.to(tl.int64) * STRIDES[0] + head.to(tl.int64) * STRIDES[1]
    return start + token * tl.full([], STRIDES[2], tl.int64)


@triton.jit
def scaled_logits(query, key, scale, soft_cap, CAPPED: tl.constexpr):
    """Return the tile's logits, float32. Full float32 products: TF32 would keep 10 bits of them."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:  # soft_cap * tanh(logits / soft_cap)
        logits = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 / soft_cap * logits) + 1.0))
    return logits


@triton.jit
def add_tile(peak, total, out, logits, value, log2_scale=LOG2E):
    """Add a tile to the running softmax; a logit of -inf does not count.

    `log2_scale` > 0 turns `logits` and `peak` into logarithms to base two: products need not be scaled before.
    """
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    # a row that has seen nothing yet has a peak of -inf, and -inf less -inf is NaN
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) * log2_scale
    weight = tl.exp2(logits * log2_scale - base[:, None])
    decay = tl.exp2(peak * log2_scale - base)
    total = total * decay + tl.sum(weight, 1)
    out = out * decay[:, None]
    out = tl.dot(weight.to(value.dtype), value, out, input_precision="ieee")
    return new_peak, total, out


@triton.jit
def add_sum(peak, total, logits):
    """Add a tile to a running log-sum-exp."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2E
    total = total * tl.exp2(peak * LOG2E - base) + tl.sum(tl.exp2(logits * LOG2E - base[:, None]), 1)
    return new_peak, total


@triton.jit
def log_sum(peak, total):
    """Return a running log-sum-exp's value; -inf where nothing was added."""
    seen = total > 0.0
    return tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)) * LN2, float("-inf"))


@triton.jit
def finish(peak, total, out):
    """Return the softmax's output, zeros where a row saw nothing, and its log-sum-exp."""
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    return out * share[:, None], log_sum(peak, total)


@triton.jit
def add_sink(out, lse, sink):
    """Give a learned sink its share of the softmax; it has no value."""
    peak = tl.maximum(lse, sink)
    weight = tl.exp2((lse - peak) * LOG2E)
    return out * (weight / (weight + tl.exp2((sink - peak) * LOG2E)))[:, None]


@triton.jit
def add_terms(
    out, lse, sink_ptr, pseudo_logit_ptr, pseudo_value_ptr, pseudo_parts, pair, h, g,
    G: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
    SINKS: tl.constexpr, PSEUDO: tl.constexpr,
):  # fmt: skip
    """Add the terms of the softmax that are no keys: a pseudo token and a learned sink."""
    if PSEUDO:
        part_ptr = pseudo_logit_ptr + (pair * G + g) * pseudo_parts
        peak, total = tl.full(g.shape, float("-inf"), tl.float32), tl.zeros(g.shape, tl.float32)
        for begin in range(0, pseudo_parts, PARTS):
            place = begin + tl.arange(0, PARTS)[None, :]
            mask = (g < G)[:, None] & (place < pseudo_parts)
            part = tl.load(part_ptr[:, None] + place, mask=mask, other=float("-inf"))
            peak, total = add_sum(peak, total, part)
        logit = log_sum(peak, total)  # of one part it is that part, to the bit
        e = tl.arange(0, BLOCK_E)
        value = tl.load(pseudo_value_ptr + pair * E + e, mask=e < E, other=0.0)
        peak = tl.maximum(lse, logit)
        # a row may have seen nothing and have no pseudo token either
        base = tl.where(peak == float("-inf"), 0.0, peak)
        weight, other = tl.exp2((lse - base) * LOG2E), tl.exp2((logit - base) * LOG2E)
        total = tl.where(weight + other > 0.0, weight + other, 1.0)
        joined = out * (weight / total)[:, None] + value[None, :] * (other / total)[:, None]
        has_one = logit != float("-inf")  # without one no bit changes
        out = tl.where(has_one[:, None], joined, out)
        lse = tl.where(has_one, log_sum(peak, total), lse)
    if SINKS:
        out = add_sink(out, lse, tl.load(sink_ptr + h * G + g, mask=g < G, other=0.0))
    return out
