"""Partial results of the Selector's kernels.

A row of T positions, of one KV head, is cut into chunks of one size, a program each. A program writes its
results to `partial` and `sums`, [quantity, row, chunk], and the next launch merges a row's chunks, CHUNKS at
a time: lane by lane, then the lanes. So empty chunks behind the last candidate change no bit, and a T that is
only a bound gives the scores of the true T. `merged`, [quantity, row], holds the results of whole rows.
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
