"""The loops that numba compiles, over numpy arrays; the `numba.py` of an op checks and calls them.

All in one file: numba's cache on disk sees only changes of the file that holds the called function. Every
argument has one type, so that a machine compiles each entry once, for all dtypes, widths and group sizes:
pages are rows of 16-bit halves, and `kind` says what they hold. Loops over numbers are functions of their
own, which LLVM turns into vector instructions more reliably. Entries with `begin` and `end` do these heads.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfi_kernels.compiled import OPTIONS, entry
from sfi_kernels.key_codes.layout import BITS, SHIFTS, SLOTS
from sfi_kernels.key_codes.reference import DROPPED, LOWEST

F = np.float32
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # kinds of pages
LINE = 64  # bytes of a cache line
AHEAD = 16  # rows of keys that are fetched before their turn
ROWS = 8  # rows whose values are added at once
BLOCK = 256  # keys whose levels are unpacked at once: 16 KiB

HALF = np.array([2.0 ** (bits - 1) for bits in BITS], F)
SHIFT = np.array(SHIFTS, np.uint32)
MASK = np.array([(2**bits - 1) << shift for bits, shift in zip(BITS, SHIFTS, strict=True)], np.uint32)
MASK = MASK.view(np.int32)
EACH = np.arange(ROWS).astype(np.uint64)
# the levels stay where they lie in the word, as signed numbers; this brings them back to 0, 1, 2, ...
UNIT = np.array([2.0**-shift for shift in SHIFTS], F) * np.where(MASK < 0, F(-1), F(1))

inner = njit(**OPTIONS)


@intrinsic
def _prefetch(context: Any, rows: Any, row: Any) -> Any:
    """Fetch a row of a contiguous 2D array into the cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(array.strides, 0)
        pointer, i32, i64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        first = builder.gep(builder.bitcast(array.data, pointer), [builder.mul(args[1], stride)])
        for line in range(8):
            offset = ir.Constant(i64, LINE * line)
            with builder.if_then(builder.icmp_signed("<", offset, stride)):
                where = builder.gep(first, [offset])
                builder.call(fetch, [where, *(ir.Constant(i32, x) for x in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(rows, types.uint64), generate


@intrinsic
def _bits(context: Any, x: Any) -> Any:
    """Return the bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def _real(context: Any, bits: Any) -> Any:
    """Return the float32 of an int32's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@inner
def _exp(x):
    # of x <= 0, to a unit in the last place or two (Cephes); 0 below the normal numbers
    n = np.floor(max(x, F(-100)) * F(1.44269504) + F(0.5))
    r = max(x, F(-100)) - n * F(0.693359375) + n * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F(c)
    power = np.int32(np.int32(n) + np.int32(127)) << np.int32(23)
    y = (p * r * r + r + F(1)) * _real(power)
    return y if x > F(-87) else F(0)


@inner
def _ordered(i):
    # the bits of a float as an integer of the same order, and back
    return np.int32(i ^ ((i >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner
def _largest(x):
    # by integers: a maximum of floats does not become vector instructions
    most = np.int32(-2147483648)
    for i in range(len(x)):
        most = max(most, _ordered(_bits(x[i])))
    return _real(_ordered(most))


@inner
def _exp_row(x, most):
    total = F(0)
    for i in range(len(x)):
        x[i] = _exp(x[i] - most)
        total += x[i]
    return total


@inner
def _scale_row(x, factor):
    for i in range(len(x)):
        x[i] *= factor


@inner
def _add_row(x, factor, y):
    for i in range(len(x)):
        y[i] += x[i] * factor


# --- codes of keys


@inner
def _dot(a, b):
    total = F(0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@inner
def _less(x, y, to):
    for i in range(len(x)):
        to[i] = x[i] - y[i]


@inner
def _project(x, basis_DC, y):
    y[:] = 0
    for first in range(0, len(y), SLOTS):
        for d in range(len(x)):
            row, own = basis_DC[d, first : first + SLOTS], y[first : first + SLOTS]
            for c in range(SLOTS):
                own[c] += x[d] * row[c]


@inner
def _pack(step, word):
    W = len(word)
    for w in range(W):
        bits = np.uint32(0)
        for s in range(SLOTS):
            level = np.floor(step[s * W + w]) + HALF[s]
            level = min(max(level, F(0)), F(2) * HALF[s] - F(1))
            bits |= np.uint32(level) << SHIFT[s]
        word[w] = np.int32(bits)


@entry
def encode(key_HTD, mean_HD, encode_HDC, word_HWT):
    """Code keys, float32, as words."""
    H, T, D = key_HTD.shape
    centered, step = np.empty(D, F), np.empty(encode_HDC.shape[2], F)
    for h in range(H):
        for t in range(T):
            _less(key_HTD[h, t], mean_HD[h], centered)
            _project(centered, encode_HDC[h], step)
            _pack(step, word_HWT[h, :, t])


@entry
def pack_levels(step_HTC, word_HWT):
    """Make words of keys' channels, float32, in steps."""
    for h in range(step_HTC.shape[0]):
        for t in range(step_HTC.shape[1]):
            _pack(step_HTC[h, t], word_HWT[h, :, t])


@inner
def _unpack(word, level):
    for s in range(SLOTS):
        mask, own = MASK[s], level[s]
        for i in range(len(word)):
            own[i] = F(word[i] & mask)


@inner
def _add_levels(level, factor, y):
    for s in range(0, SLOTS, 4):
        l0, l1, l2, l3 = level[s], level[s + 1], level[s + 2], level[s + 3]
        f0, f1, f2, f3 = factor[s], factor[s + 1], factor[s + 2], factor[s + 3]
        for i in range(len(y)):
            y[i] += (l0[i] * f0 + l1[i] * f1) + (l2[i] * f2 + l3[i] * f3)


@entry
def scan(begin, end, query_HGD, word_X, head_stride, stride, mean_HD, query_HDC, scale, logits_HGT):
    """Score all keys by their words; those of head h lie from `h * head_stride` of `word_X` on."""
    _, G, T = logits_HGT.shape
    C = query_HDC.shape[2]
    W = C // SLOTS
    level, channel = np.empty((SLOTS, BLOCK), F), np.empty(C, F)
    factor, constant = np.empty((W, G, SLOTS), F), np.empty(G, F)
    for h in range(begin, end):
        for g in range(G):
            constant[g] = _dot(query_HGD[h, g], mean_HD[h]) * scale
            _project(query_HGD[h, g], query_HDC[h], channel)
            for c in range(C):
                s, scaled = c // W, channel[c] * scale
                constant[g] += scaled * (F(0.5) - HALF[s])
                factor[c % W, g, s] = scaled * UNIT[s]
        for first in range(0, T, BLOCK):
            n = min(BLOCK, T - first)
            logits_HGT[h, :, first : first + n] = constant[:, None]
            for w in range(W):
                place = h * head_stride + w * stride + first
                _unpack(word_X[place : place + n], level)
                for g in range(G):
                    _add_levels(level, factor[w, g], logits_HGT[h, g, first : first + n])


# --- choosing


@inner
def _count(score, least):
    n = F(0)  # of floats, which become vectors; exact up to 2^24
    for i in range(len(score)):
        n += F(1) if score[i] >= least else F(0)
    return np.int64(n)


@inner
def _coarsen(score):
    for i in range(len(score)):
        level = (_bits(score[i]) >> np.int32(DROPPED)) - np.int32(LOWEST)
        score[i] = F(min(max(level, np.int32(0)), np.int32(255)))


@inner
def _threshold(score, K):
    # the largest of the 256 scores that at least K reach
    low, high = 0, 256
    while high - low > 1:
        middle = (low + high) // 2
        if _count(score, F(middle)) >= K:
            low = middle
        else:
            high = middle
    return F(low)


@inner
def _keep(score, least, place):
    # move the scores from `least` on to the front, and their positions to `place`; returns how many
    n = 0
    for i in range(len(score)):  # without a branch
        x = score[i]
        score[n] = x
        place[n] = i
        n += x >= least
    return n


@inner
def _take(score, least, room, place, index):
    # the positions above `least`, and the first `room` of those equal to it; returns how many
    n = 0
    for i in range(len(score)):
        equal = score[i] == least
        if n < len(index) and (score[i] > least or (equal and room > 0)):
            room -= equal
            index[n] = place[i]
            n += 1
    return n


@entry
def choose(begin, end, logits_HGT, K, rest, index_HK, unread_HG):
    """Choose the K likeliest of T > K keys, and overwrite the logits; a tie goes to the lower position."""
    _, G, T = logits_HGT.shape
    score, place = np.empty(T, F), np.empty(T, np.int32)
    total, log_sum = np.empty(G, F), np.empty(G, F)
    for h in range(begin, end):
        score[:] = 0
        for g in range(G):
            most = _largest(logits_HGT[h, g])
            total[g] = _exp_row(logits_HGT[h, g], most)
            log_sum[g] = most + F(math.log(total[g]))
            _add_row(logits_HGT[h, g], F(1) / (total[g] * F(G)), score)
        _coarsen(score)
        least = _threshold(score, K)
        n = _keep(score, least, place)
        room = K - _count(score[:n], least + F(1))
        n = _take(score[:n], least, room, place, index_HK[h])
        index_HK[h, n:] = 0  # NaN among the logits
        for g in range(G):
            read = F(0)
            for i in range(K):
                read += logits_HGT[h, g, index_HK[h, i]]
            unread = max(F(1) - read / total[g], F(0)) * rest
            unread_HG[h, g] = log_sum[g] + F(math.log(unread)) if unread > F(0) else F(-np.inf)


# --- attention


@inner
def _widen_bfloat16(source, to):
    for i in range(len(to)):
        to[i] = _real(np.int32(np.int32(source[i]) << np.int32(16)))


@inner
def _widen_float16(source, to):
    for i in range(len(to)):
        half = np.int32(source[i])
        magnitude = _real(np.int32((half & np.int32(0x7FFF)) << np.int32(13))) * F(2.0**112)
        sign = np.int32((half & np.int32(0x8000)) << np.int32(16))
        to[i] = _real(np.int32(_bits(magnitude) | sign))


@inner
def _widen(kind, source, to):
    if kind == BFLOAT16:
        _widen_bfloat16(source, to)
    else:
        _widen_float16(source, to)


@inner
def _bend(x, cap):
    # to cap times tanh of x by cap
    for i in range(len(x)):
        shrunk = _exp(F(-2) * abs(x[i] / cap))
        bent = cap * (F(1) - shrunk) / (F(1) + shrunk)
        x[i] = bent if x[i] >= F(0) else -bent


@inner
def _add_rows(value, row, p, y):
    a, b, c, d = value[row[0]], value[row[1]], value[row[2]], value[row[3]]
    e, f, g, h = value[row[4]], value[row[5]], value[row[6]], value[row[7]]
    for i in range(len(y)):
        y[i] += (p[0] * a[i] + p[1] * b[i] + p[2] * c[i] + p[3] * d[i]) + (
            p[4] * e[i] + p[5] * f[i] + p[6] * g[i] + p[7] * h[i]
        )


@inner
def _softmax(x, cap, logit, sink):
    # of capped logits, in place, beside a pseudo token and a learned sink; returns the pseudo token's share
    if cap > F(0):
        _bend(x, cap)
    most = max(_largest(x), logit, sink)
    share = _exp(logit - most)
    total = _exp_row(x, most) + share + _exp(sink - most)
    _scale_row(x, F(1) / total)
    return share / total


@inner
def _rows(position, start, stop, table, H, h, N, row):
    # the rows of pages that hold packed and recent tokens, then ROWS times the last one; returns how many
    n = len(position)
    for i in range(n):
        row[i] = position[i]
        if np.uint32(position[i]) >= np.uint32(stop):
            raise IndexError("a packed position lies beyond the cached tokens")
    for i in range(stop - start):
        row[n + i] = start + i
    n += stop - start
    if len(table) == 1:
        first = (np.uint64(table[0]) * np.uint64(H) + np.uint64(h)) * np.uint64(N)
        for i in range(n):
            row[i] += first
    else:
        for i in range(n):
            slot = np.uint32(row[i]) // np.uint32(N)
            page = np.uint64(table[slot]) * np.uint64(H) + np.uint64(h)
            row[i] += (page - np.uint64(slot)) * np.uint64(N)
    for i in range(n, n + ROWS):
        row[i] = row[max(n - 1, 0)]
    return n


@inner
def _products(query, key, value, row, n, scale, p):
    for i in range(n):
        _prefetch(key, row[min(i + AHEAD, n - 1)])
        _prefetch(value, row[i])
        for g in range(len(query)):
            p[g, i] = _dot(query[g], key[row[i]]) * scale


@inner
def _products_16(query, key, value, kind, row, n, scale, p, wide):
    for i in range(n):
        _prefetch(key, row[min(i + AHEAD, n - 1)])
        _prefetch(value, row[i])
        _widen(kind, key[row[i]], wide)
        for g in range(len(query)):
            p[g, i] = _dot(query[g], wide) * scale


@inner
def _sum_values(value, row, n, p, out):
    for first in range(0, n, ROWS):
        for g in range(len(out)):
            _add_rows(value, row[first : first + ROWS], p[g, first : first + ROWS], out[g])


@inner
def _sum_values_16(value, kind, row, n, p, wide, out):
    for first in range(0, n, ROWS):
        for i in range(ROWS):
            _widen(kind, value[row[first + i]], wide[i])
        for g in range(len(out)):
            _add_rows(wide, EACH, p[g, first : first + ROWS], out[g])


@entry
def attend(
    begin, end, query_BHGD, key_XD, value_XE, half_key_XD, half_value_XE, kind, N, position_BHS, length_BH, table_BP,
    start_B, stop_B, scale, cap, sink_HG, pseudo_logit_BHG, pseudo_value_BHE, out_BHGE,
):  # fmt: skip
    """Attend to rows of pages, and add to `out`: float32 pages, or if `kind` says so those of 16 bits.

    No cap is 0, no sink and no pseudo token an empty array.
    """
    B, H, G, D = query_BHGD.shape
    E = out_BHGE.shape[3]
    most = 0
    for b in range(B):
        most = max(most, position_BHS.shape[2] + stop_B[b] - start_B[b] + ROWS)
    p, row = np.empty((G, most), F), np.empty(most, np.uint64)
    # contiguous: a slice of a wider array would not become vector instructions
    wide_key, wide_values = np.empty(D, F), np.empty((ROWS, E), F)
    for b in range(B):
        for h in range(begin, end):
            q, out = query_BHGD[b, h], out_BHGE[b, h]
            packed = position_BHS[b, h, : length_BH[b, h]]
            n = _rows(packed, start_B[b], stop_B[b], table_BP[b], H, h, N, row)
            if kind == FLOAT32:
                _products(q, key_XD, value_XE, row, n, scale, p)
            else:
                _products_16(q, half_key_XD, half_value_XE, kind, row, n, scale, p, wide_key)
            for g in range(G):
                logit, sink = F(-np.inf), F(-np.inf)
                if len(pseudo_logit_BHG):
                    logit = pseudo_logit_BHG[b, h, g]
                if len(sink_HG):
                    sink = sink_HG[h, g]
                share = _softmax(p[g, :n], cap, logit, sink)
                for i in range(n, n + ROWS):
                    p[g, i] = 0
                if share > F(0):
                    _add_row(pseudo_value_BHE[b, h], share, out[g])
            if kind == FLOAT32:
                _sum_values(value_XE, row, n, p, out)
            else:
                _sum_values_16(half_value_XE, kind, row, n, p, wide_values, out)
