"""One tile of keys in an online softmax. Logits are natural; the softmax runs in powers of two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rows(pointer, row, width, mask, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of `WIDTH` numbers, padded to `BLOCK`: `pointer` and `row` give where each begins."""
    column = tl.arange(0, BLOCK)
    where = pointer + row[:, None] * width + column[None, :]
    if WIDTH == BLOCK:
        return tl.load(where, mask=mask[:, None], other=0.0)
    return tl.load(where, mask=mask[:, None] & (column[None, :] < WIDTH), other=0.0)


@triton.jit
def scaled_logits(query, key, scale, soft_cap, CAPPED: tl.constexpr):
    """Return the tile's logits, float32. Full float32 products: TF32 would keep 10 bits of them."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
    if CAPPED:  # soft_cap * tanh(logits / soft_cap)
        logits = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 / soft_cap * logits) + 1.0))
    return logits


@triton.jit
def add_tile(peak, total, out, logits, value):
    """Add a tile to the running softmax; a logit of -inf is not seen."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    # a row that has seen nothing yet has a peak of -inf, and -inf less -inf is NaN
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2E
    weight = tl.exp2(logits * LOG2E - base[:, None])
    decay = tl.exp2(peak * LOG2E - base)
    total = total * decay + tl.sum(weight, 1)
    out = out * decay[:, None]
    out = tl.dot(weight.to(value.dtype), value, out, input_precision="ieee")
    return new_peak, total, out


@triton.jit
def add_sum(peak, total, logits):
    """Add a tile to a running log-sum-exp."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak) * LOG2E
    total = total * tl.exp2(peak * LOG2E - base) + tl.sum(
        tl.exp2(logits * LOG2E - base[:, None]), 1
    )
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
    own = tl.exp2((lse - peak) * LOG2E)
    return out * (own / (own + tl.exp2((sink - peak) * LOG2E)))[:, None]
