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

from sfi_kernels.code_scan.codes import BITS, DROPPED, LOWEST, SHIFTS, SLOTS
from sfi_kernels.compiled import OPTIONS, entry
from sfi_kernels.step_descriptor import ALLOWED_START, ALLOWED_STOP, FAST, LENGTH, MODE, QUERIES

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
    for d in range(len(x)):
        row = basis_DC[d]
        for c in range(SLOTS):
            y[c] += x[d] * row[c]


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


@inner
def _code(key, mean, encode_WDC, centered, word):
    W = len(word)
    own, step = np.empty(SLOTS, F), np.empty(SLOTS * W, F)
    _less(key, mean, centered)
    for w in range(W):
        _project(centered, encode_WDC[w], own)
        for s in range(SLOTS):
            step[s * W + w] = own[s]
    _pack(step, word)


@entry
def encode(key_HTD, mean_HD, encode_HWDC, word_HWT):
    """Code keys, float32, as words."""
    centered = np.empty(key_HTD.shape[2], F)
    for h in range(key_HTD.shape[0]):
        for t in range(key_HTD.shape[1]):
            _code(key_HTD[h, t], mean_HD[h], encode_HWDC[h], centered, word_HWT[h, :, t])


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


@inner
def _scan(query_GD, word_X, begin, stride, mean, query_WCD, scale, logits_GT):
    # score a head's keys by their words, which lie from `begin` of `word_X` on
    (G, T), W = logits_GT.shape, len(query_WCD)
    level = np.empty((SLOTS, BLOCK), F)
    factor, constant = np.empty((W, G, SLOTS), F), np.empty(G, F)
    for g in range(G):
        constant[g] = _dot(query_GD[g], mean) * scale
        for w in range(W):
            for s in range(SLOTS):
                scaled = _dot(query_GD[g], query_WCD[w, s]) * scale
                constant[g] += scaled * (F(0.5) - HALF[s])
                factor[w, g, s] = scaled * UNIT[s]
    for first in range(0, T, BLOCK):
        n = min(BLOCK, T - first)
        for g in range(G):
            logits_GT[g, first : first + n] = constant[g]
        for w in range(W):
            place = begin + w * stride + first
            _unpack(word_X[place : place + n], level)
            for g in range(G):
                _add_levels(level, factor[w, g], logits_GT[g, first : first + n])


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


@inner
def _diagnose(score, index, unread):
    # of probabilities: the sum of those that are not chosen, and the least chosen over the most of the others
    least = F(np.inf)
    for i in range(len(index)):
        least = min(least, score[index[i]])
        score[index[i]] = 0
    total = F(0)
    for i in range(len(score)):
        total += score[i]
    unread[0], unread[1] = total, least / _largest(score)


@inner
def _choose(logits_GT, rest, index, unread_logit, unread):
    # the likeliest of more than K keys; overwrites the logits; a tie goes to the lower position
    (G, T), K = logits_GT.shape, len(index)
    score, place = np.zeros(T, F), np.empty(T, np.int32)
    total, log_sum = np.empty(G, F), np.empty(G, F)
    for g in range(G):
        most = _largest(logits_GT[g])
        total[g] = _exp_row(logits_GT[g], most)
        log_sum[g] = most + F(math.log(total[g]))
        _add_row(logits_GT[g], F(1) / (total[g] * F(G)), score)
    exact = np.empty(T if len(unread) else 0, F)
    for i in range(len(exact)):
        exact[i] = score[i]
    _coarsen(score)
    least = _threshold(score, K)
    n = _keep(score, least, place)
    room = K - _count(score[:n], least + F(1))
    n = _take(score[:n], least, room, place, index)
    for i in range(n, K):  # NaN among the logits
        index[i] = 0
    for g in range(G):
        read = F(0)
        for i in range(K):
            read += logits_GT[g, index[i]]
        share = max(F(1) - read / total[g], F(0)) * rest
        unread_logit[g] = log_sum[g] + F(math.log(share)) if share > F(0) else F(-np.inf)
    if len(unread):
        _diagnose(exact, index, unread)


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
def _add_rows(value, row, weight, out):
    # eight weighted rows in one pass over `out`
    v0, v1, v2, v3 = value[row[0]], value[row[1]], value[row[2]], value[row[3]]
    v4, v5, v6, v7 = value[row[4]], value[row[5]], value[row[6]], value[row[7]]
    for i in range(len(out)):
        out[i] += (weight[0] * v0[i] + weight[1] * v1[i] + weight[2] * v2[i] + weight[3] * v3[i]) + (
            weight[4] * v4[i] + weight[5] * v5[i] + weight[6] * v6[i] + weight[7] * v7[i]
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


# --- the choice of a batch


@inner
def _read(rows, half_rows, kind, row, wide):
    # a row of pages, as float32
    if kind == FLOAT32:
        for i in range(len(wide)):
            wide[i] = rows[row, i]
    else:
        _widen(kind, half_rows[row], wide)


@inner
def _row(table, t, H, h, N):
    return (np.uint64(table[t // N]) * np.uint64(H) + np.uint64(h)) * np.uint64(N) + np.uint64(t % N)


@inner
def _note(index, n, first, position):
    # the sinks, the chosen positions, and -1
    for i in range(len(position)):
        position[i] = i if i < first else -1
    for i in range(n):
        position[first + i] = index[i]


@entry
def code_scan(
    begin, end, query_BHGD, key_XD, value_XE, half_key_XD, half_value_XE, kind, N, table_BP, step_BX, mean_BHD,
    encode_BHWDC, query_BHWCD, word_BHWT, sum_BHE, summed_BH, position_BHS, length_BH, index_BHK, logit_BHG,
    value_BHE, unread_BHC, scale, rest,
):  # fmt: skip
    """Code new keys, and choose for the fast requests; `code_scan.reference` has the arguments."""
    (B, H, W, T), K = word_BHWT.shape, index_BHK.shape[2]
    key, value = np.empty(mean_BHD.shape[2], F), np.empty(sum_BHE.shape[2], F)
    centered, words = np.empty(len(key), F), word_BHWT.reshape(word_BHWT.size)
    for b in range(B):
        mode, first, stop = step_BX[b, MODE], step_BX[b, ALLOWED_START], step_BX[b, ALLOWED_STOP]
        if mode < FAST:
            continue
        n = max(stop - first, 0)
        logits = np.empty((query_BHGD.shape[2], n if n > K else 0), F)
        for h in range(begin, end):
            for t in range(step_BX[b, LENGTH] - step_BX[b, QUERIES], step_BX[b, LENGTH]):
                _read(key_XD, half_key_XD, kind, _row(table_BP[b], t, H, h, N), key)
                _code(key, mean_BHD[b, h], encode_BHWDC[b, h], centered, word_BHWT[b, h, :, t])
            if mode != FAST:
                continue
            known = summed_BH[b, h]
            if known == 0:
                known = first
                _scale_row(sum_BHE[b, h], F(0))
            for t in range(known, stop):
                _read(value_XE, half_value_XE, kind, _row(table_BP[b], t, H, h, N), value)
                _add_row(value, F(1), sum_BHE[b, h])
            summed_BH[b, h] = max(known, stop)
            _add_row(sum_BHE[b, h], F(1) / F(max(1, max(known, stop) - first)), value_BHE[b, h])
            index = index_BHK[b, h]
            if n > K:
                begin_X = (b * H + h) * W * T + first
                _scan(query_BHGD[b, h], words, begin_X, T, mean_BHD[b, h], query_BHWCD[b, h], scale, logits)
                _choose(logits, rest, index, logit_BHG[b, h], unread_BHC[b, h])
            for i in range(min(n, K)):
                index[i] = first + (index[i] if n > K else i)
            _note(index, min(n, K), first, position_BHS[b, h])
            length_BH[b, h] = first + min(n, K)


# --- weights


@entry
def row_product(begin, end, weight_OI, row, out):
    """Multiply rows `begin` to `end` - 1 of a matrix by a vector."""
    for o in range(begin, end):
        out[o] = _dot(weight_OI[o], row)
