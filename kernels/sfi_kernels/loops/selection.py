"""The Selector's scores of an interval of positions, a request's KV heads in turn (Algorithm 2)."""

import numpy as np

from sfi_kernels.compiled import entry
from sfi_kernels.constants import EPS
from sfi_kernels.loops.vectors import F, bits_of, exp, inner, largest, real, scale_row

LEAST = F(np.log(EPS))


@inner
def log(x):
    # of x >= 0, to a unit in the last place or two (Cephes); -88 at 0
    bits = bits_of(x)
    e, m = F((bits >> np.int32(23)) - np.int32(126)), real(np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)))
    low = m < F(0.70710678)
    e, r = (e - F(1) if low else e), (m + m if low else m) - F(1)
    p = F(7.0376836292e-2)
    for c in (
        -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
        -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        p = p * r + F(c)
    return r + (p * r * r * r - F(0.5) * r * r) + e * F(0.693147181)


@inner
def _larger(x, y, to):
    for i in range(len(to)):
        to[i] = x[i] if x[i] > y[i] else y[i]  # noqa: FURB136 - becomes vector instructions


@inner
def _peak(x, radius, padded, other):
    # the maximum over `radius` neighbors on each side, by windows that double
    n = len(x)
    for i in range(radius):
        padded[i] = padded[radius + n + i] = F(-np.inf)
    for i in range(n):
        padded[radius + i] = x[i]
    reached, length = 1, n + 2 * radius
    while reached < 2 * radius + 1:
        step = min(reached, 2 * radius + 1 - reached)
        length -= step
        _larger(padded[:length], padded[step:], other[:length])
        padded, other = other, padded
        reached += step
    return padded[:n]


@inner
def _add_power(x, alpha, log_sum, mean):
    for i in range(len(mean)):
        mean[i] += exp(alpha * (x[i] - log_sum))


@inner
def _power(x, factor, power):
    # of x by factor, in place; returns the sum
    total = F(0)
    for i in range(len(x)):
        y = x[i] * factor
        y = y if power == F(1) else y * y if power == F(2) else exp(power * log(y))
        x[i] = y
        total += y
    return total


@inner
def _prior(norm, gamma, place, weight):
    # Eqs. 9 and 12: the logarithms, less the largest, so that no power overflows
    for i in range(len(norm)):
        weight[i] = -gamma * log(norm[i] + F(EPS))
    most, total = largest(weight), F(0)
    for i in range(len(norm)):
        weight[i] = exp(weight[i] - most) * place[i]
        total += weight[i]
    return total


@inner
def _moments(f, r, sums):
    # |f - r|^2, f (f - r), |f|^2, f r, |r|^2
    distance, gain, ff, fr, rr = F(0), F(0), F(0), F(0), F(0)
    for i in range(len(f)):
        difference = f[i] - r[i]
        distance += difference * difference
        gain += f[i] * difference
        ff += f[i] * f[i]
        fr += f[i] * r[i]
        rr += r[i] * r[i]
    sums[0], sums[1], sums[2], sums[3], sums[4] = distance, gain, ff, fr, rr


@inner
def _entropy(f):
    total = F(0)
    for i in range(len(f)):
        total -= f[i] * log(f[i])
    return total


@inner
def _fuse(f, r, weight, z):
    # Eqs. 15 and 19
    for i in range(len(f)):
        z[i] = log(f[i] + weight * (r[i] - f[i]) + F(EPS))


@inner
def _lower(z, peak, alpha_soft, to):
    # Eq. 21
    for i in range(len(to)):
        to[i] = z[i] - alpha_soft * (peak[i] - z[i])


@inner
def _add_share(z, best, temperature, total):
    for i in range(len(z)):
        total[i] += exp((z[i] - best[i]) / temperature)


@inner
def _log_row(x):
    for i in range(len(x)):
        x[i] = log(x[i])


@inner
def _exclude(z, best, log_total, alpha_cross, temperature):
    for i in range(len(z)):
        share = (z[i] - best[i]) / temperature - log_total[i]
        z[i] += alpha_cross * max(share, LEAST)


@inner
def _compete(score_HT, first, n, alpha_cross, temperature, best, total):
    # Eqs. 22 and 23
    best[:n] = F(-np.inf)
    total[:n] = F(0)
    for h in range(len(score_HT)):
        _larger(score_HT[h, first : first + n], best[:n], best[:n])
    for h in range(len(score_HT)):
        _add_share(score_HT[h, first : first + n], best, temperature, total)
    _log_row(total[:n])
    for h in range(len(score_HT)):
        _exclude(score_HT[h, first : first + n], best, total, alpha_cross, temperature)


@inner
def _evidence(logits_QT, log_sum_Q, alpha, span, padded, other, f):
    # Eqs. 6 to 8; the mean's scale cancels
    for i in range(len(f)):
        f[i] = 0
    for q in range(len(logits_QT)):
        x = _peak(logits_QT[q], span, padded, other)
        if len(log_sum_Q):
            log_sum = log_sum_Q[q]
        else:
            most, log_sum = largest(x), F(-np.inf)
            if most > F(-np.inf):
                log_sum = most + log(_sum(x, most))
        if log_sum > F(-np.inf):  # else the query sees nothing
            _add_power(x, alpha, log_sum, f)
    peak = largest(f)
    total = _power(f, F(1) / peak if peak > F(0) else F(0), F(1) / alpha)
    scale_row(f, F(1) / max(total, F(1)))


@inner
def _sum(x, most):
    total = F(0)
    for i in range(len(x)):
        total += exp(x[i] - most)
    return total


@entry
def select(
    begin, end, logits_BHQT, log_sum_BHQ, norm_BHT, place_N, first, span, alpha, gamma, lambda_clip, alpha_soft,
    radius, alpha_cross, temperature, score_BHT, lambda_BH, note_BHX,
):  # fmt: skip
    """Score positions `first` to `first + len(place) - 1`; `selector.reference` has the arguments.

    No log-sum-exps are an empty array; `place` is Eq. 11's factor. Notes are the diagnostics, where there is room.
    """
    H, n = logits_BHQT.shape[1], len(place_N)
    wide = n + 2 * max(span, radius)
    padded, other, f, r = np.empty(wide, F), np.empty(wide, F), np.empty(n, F), np.empty(n, F)
    sums, nothing = np.empty(5, F), np.empty(0, F)
    for b in range(begin, end):
        for h in range(H):
            log_sum = log_sum_BHQ[b, h] if len(log_sum_BHQ) else nothing
            _evidence(logits_BHQT[b, h, :, first : first + n], log_sum, alpha, span, padded, other, f)
            total = _prior(norm_BHT[b, h, first : first + n], gamma, place_N, r)
            scale_row(r, F(1) / total if total > F(0) else F(0))
            _moments(f, r, sums)
            weight = F(0)
            if sums[0] > F((8 * 2.0**-23) ** 2) * sums[2]:  # closer, the quotient would be noise
                weight = min(max(sums[1] / sums[0], F(0)), lambda_clip)
            lambda_BH[b, h] = weight
            if len(note_BHX):
                note_BHX[b, h, 0], note_BHX[b, h, 1], note_BHX[b, h, 2] = sums[2], sums[3], sums[4]
                note_BHX[b, h, 3] = _entropy(f)
            _fuse(f, r, weight, r)
            _lower(r, _peak(r, radius, padded, other), alpha_soft, score_BHT[b, h, first : first + n])
        if alpha_cross != F(0):
            _compete(score_BHT[b], first, n, alpha_cross, temperature, f, r)
