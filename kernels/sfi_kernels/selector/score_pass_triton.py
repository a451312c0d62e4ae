"""From the power mean to the scores: Eqs. 8 to 23.

Evidence and prior are never stored: recomputing them from the power mean and the key norm is cheap. The prior
stays a power of two until its peak is known, so that neither long nor zero keys overflow.
"""

import math

import triton
import triton.language as tl

from sfi_kernels.constants import EPS, MASKED_SCORE
from sfi_kernels.selector import logit_pass_triton as q
from sfi_kernels.selector.logit_pass_triton import finite, load_chunks, merge_peak

EPSILON, LOG_EPSILON = tl.constexpr(EPS), tl.constexpr(math.log(EPS))
MASKED = tl.constexpr(MASKED_SCORE)
LOG2E, LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
# of float32: the largest number's logarithm, the smallest normal one, and `stable_weight`'s rounding
LOG2_LARGEST, SMALLEST = tl.constexpr(128.0), tl.constexpr(2.0**-126)
ROUNDING = tl.constexpr((8 * 2.0**-23) ** 2)


@triton.jit
def _evidence(mean, peak, alpha):
    """Return f relative to its peak, and its logarithm to base 2; 0 where there is none."""
    # Eq. 8
    relative = mean / tl.where(peak > 0, peak, 1.0)
    power = tl.log2(tl.where(relative > 0, relative, 1.0)) / alpha
    return tl.where(relative > 0, tl.exp2(power), 0.0), power


@triton.jit
def _prior_power(t, key_norm, inside, first, last, gamma, beta, power, eta):
    """Return the logarithm to base 2 of the prior before normalization; -inf outside J."""
    # Eq. 9
    key_power = tl.minimum(-gamma * tl.log2(key_norm + EPSILON), LOG2_LARGEST)
    # Eq. 10; rounded division, since the newest position's u is 1 and Eq. 11 is steep there
    u = tl.div_rn(t.to(tl.float32) - first, last - first + EPSILON)
    u = tl.minimum(tl.maximum(u, 0.0), 1.0)
    # Eq. 11
    decay = tl.exp2(power * tl.log2(tl.maximum(u, SMALLEST)))
    position_power = eta * tl.log2(1.0 - u + EPSILON) - beta * LOG2E * decay
    # Eq. 12
    return tl.where(inside, key_power + position_power, q.NOTHING)


@triton.jit(do_not_specialize=["allowed_stride", "norm_batch_stride", "norm_head_stride", "H", "T"])
def _selector_sum_kernel(
    mean_ptr, key_norm_ptr, allowed_ptr, partial_ptr, sums_ptr,
    allowed_stride, norm_batch_stride, norm_head_stride, H, T,
    alpha, gamma, beta, power, eta,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunks = tl.num_programs(1)
    quantity = tl.num_programs(0).to(tl.int64) * chunks
    mean_ptr += row * T
    key_norm_ptr += row // H * norm_batch_stride + row % H * norm_head_stride
    allowed_ptr += row // H * allowed_stride
    partial_ptr += row * chunks
    sums_ptr += row * chunks + chunk
    evidence_peak = merge_peak(partial_ptr + q.EVIDENCE_PEAK * quantity, chunks, CHUNKS)
    first = -merge_peak(partial_ptr + q.NEGATIVE_FIRST * quantity, chunks, CHUNKS)
    last = merge_peak(partial_ptr + q.LAST * quantity, chunks, CHUNKS)
    t = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = tl.load(allowed_ptr + t, mask=t < T, other=False)
    mean = tl.load(mean_ptr + t, mask=inside, other=0.0)
    key_norm = tl.load(key_norm_ptr + t, mask=inside, other=1.0).to(tl.float32)
    f, f_power = _evidence(mean, evidence_peak, alpha)
    r_power = _prior_power(t, key_norm, inside, first, last, gamma, beta, power, eta)
    # whole powers of two rescale without rounding
    peak = tl.ceil(tl.max(r_power, 0))
    f = f.to(tl.float64)  # [BLOCK]
    r = tl.exp2(r_power - finite(peak)).to(tl.float64)
    tl.store(partial_ptr + q.PRIOR_PEAK * quantity + chunk, peak)
    tl.store(sums_ptr + q.F * quantity, tl.sum(f, 0))
    tl.store(sums_ptr + q.R * quantity, tl.sum(r, 0))
    tl.store(sums_ptr + q.FF * quantity, tl.sum(f * f, 0))
    tl.store(sums_ptr + q.FR * quantity, tl.sum(f * r, 0))
    tl.store(sums_ptr + q.RR * quantity, tl.sum(r * r, 0))
    tl.store(sums_ptr + q.F_LOG_F * quantity, tl.sum(f * f_power.to(tl.float64), 0))


@triton.jit(do_not_specialize=["chunks"])
def _selector_weigh_kernel(partial_ptr, sums_ptr, merged_ptr, chunks, lambda_clip, CHUNKS: tl.constexpr):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    quantity = rows * chunks
    partial_ptr += row * chunks
    sums_ptr += row * chunks
    merged_ptr += row
    for index in tl.static_range(q.PRIOR_PEAK):
        merged = merge_peak(partial_ptr + index * quantity, chunks, CHUNKS)
        tl.store(merged_ptr + index * rows, merged)
    base = finite(merge_peak(partial_ptr + q.PRIOR_PEAK * quantity, chunks, CHUNKS))
    nothing = tl.zeros([CHUNKS], tl.float64)
    fs, rs, ffs, frs, rrs, f_log_fs = nothing, nothing, nothing, nothing, nothing, nothing
    for begin in range(0, chunks, CHUNKS):
        peak = load_chunks(partial_ptr + q.PRIOR_PEAK * quantity, begin, chunks, q.NOTHING, CHUNKS)
        scale = tl.exp2(peak - base).to(tl.float64)
        fs += load_chunks(sums_ptr + q.F * quantity, begin, chunks, 0.0, CHUNKS)
        rs += load_chunks(sums_ptr + q.R * quantity, begin, chunks, 0.0, CHUNKS) * scale
        ffs += load_chunks(sums_ptr + q.FF * quantity, begin, chunks, 0.0, CHUNKS)
        frs += load_chunks(sums_ptr + q.FR * quantity, begin, chunks, 0.0, CHUNKS) * scale
        rrs += load_chunks(sums_ptr + q.RR * quantity, begin, chunks, 0.0, CHUNKS) * scale * scale
        f_log_fs += load_chunks(sums_ptr + q.F_LOG_F * quantity, begin, chunks, 0.0, CHUNKS)
    f, r, f_log_f = tl.sum(fs, 0), tl.sum(rs, 0), tl.sum(f_log_fs, 0)
    ff, fr, rr = tl.sum(ffs, 0), tl.sum(frs, 0), tl.sum(rrs, 0)
    some_f, some_r = tl.where(f > 0, f, 1.0), tl.where(r > 0, r, 1.0)
    f_scale, r_scale = tl.where(f > 0, 1.0 / some_f, 0.0), tl.where(r > 0, 1.0 / some_r, 0.0)
    ff, fr, rr = ff * f_scale * f_scale, fr * f_scale * r_scale, rr * r_scale * r_scale

    # Eqs. 17 and 18; float64 leaves |f - r|^2 a rounding far below the one that counts as equal
    distance = ff - 2.0 * fr + rr
    apart = distance > ROUNDING * ff
    weight = tl.where(apart, (ff - fr) / tl.where(apart, distance, 1.0), 0.0).to(tl.float32)
    weight = tl.minimum(tl.maximum(weight, 0.0), lambda_clip)
    entropy = tl.log(some_f.to(tl.float32)) - (f_log_f * f_scale * LN2).to(tl.float32)

    tl.store(merged_ptr + q.PRIOR_PEAK * rows, base)
    tl.store(merged_ptr + q.EVIDENCE_SCALE * rows, f_scale.to(tl.float32))
    tl.store(merged_ptr + q.PRIOR_SCALE * rows, r_scale.to(tl.float32))
    tl.store(merged_ptr + q.WEIGHT * rows, weight)
    tl.store(merged_ptr + q.NORM2 * rows, ff.to(tl.float32))
    tl.store(merged_ptr + q.DOT * rows, fr.to(tl.float32))
    tl.store(merged_ptr + q.PRIOR_NORM2 * rows, rr.to(tl.float32))
    tl.store(merged_ptr + q.ENTROPY * rows, entropy)


@triton.jit(do_not_specialize=["allowed_stride", "norm_batch_stride", "norm_head_stride", "H", "T"])
def _selector_score_kernel(
    mean_ptr, key_norm_ptr, allowed_ptr, merged_ptr,
    allowed_stride, norm_batch_stride, norm_head_stride, H, T,
    alpha, gamma, beta, power, eta,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    mean_ptr += row * T
    merged_ptr += row
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = tl.load(allowed_ptr + row // H * allowed_stride + t, mask=t < T, other=False)
    key_norm_ptr += row // H * norm_batch_stride + row % H * norm_head_stride
    key_norm = tl.load(key_norm_ptr + t, mask=inside, other=1.0).to(tl.float32)
    mean = tl.load(mean_ptr + t, mask=inside, other=0.0)
    f, _ = _evidence(mean, tl.load(merged_ptr + q.EVIDENCE_PEAK * rows), alpha)
    first = -tl.load(merged_ptr + q.NEGATIVE_FIRST * rows)
    last = tl.load(merged_ptr + q.LAST * rows)
    r_power = _prior_power(t, key_norm, inside, first, last, gamma, beta, power, eta)
    f *= tl.load(merged_ptr + q.EVIDENCE_SCALE * rows)
    r = tl.exp2(r_power - tl.load(merged_ptr + q.PRIOR_PEAK * rows))
    r *= tl.load(merged_ptr + q.PRIOR_SCALE * rows)
    weight = tl.load(merged_ptr + q.WEIGHT * rows)
    # Eqs. 15 and 19
    z = tl.log((1.0 - weight) * f + weight * r + EPSILON)
    # in the place of the power mean, which only this program reads
    tl.store(mean_ptr + t, tl.where(inside, z, MASKED), mask=t < T)


@triton.jit(do_not_specialize=["H", "T", "radius"])
def _selector_refine_kernel(
    score_ptr, adjusted_ptr, H, T, radius, alpha_soft, alpha_cross, temperature,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (head < H) & (t < T)
    score_ptr += batch * H * T
    adjusted_ptr += batch * H * T
    offset = head * T + t  # [HEADS, BLOCK]
    z = tl.load(score_ptr + offset, mask=mask, other=MASKED)
    # Eq. 20
    peak = z
    for shift in tl.range(1, radius + 1, loop_unroll_factor=2):
        older = tl.load(score_ptr + offset - shift, mask=mask & (t >= shift), other=MASKED)
        newer = tl.load(score_ptr + offset + shift, mask=mask & (t + shift < T), other=MASKED)
        peak = tl.maximum(peak, tl.maximum(older, newer))
    # Eq. 21
    z_nms = z - alpha_soft * (peak - z)
    # Eq. 22; rows that pad H are masked everywhere, and a masked score has no share beside another
    lead = (z_nms - tl.max(z_nms, 0)[None, :]) / temperature
    log_share = lead - tl.log(tl.sum(tl.exp(lead), 0))[None, :]
    # Eq. 23
    z_adj = z_nms + alpha_cross * tl.maximum(log_share, LOG_EPSILON)
    tl.store(adjusted_ptr + offset, z_adj, mask=mask)
