"""CodeScan: keys as words, their scores, and the choice of a batch."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sfi_kernels.code_scan.codes import BITS, DROPPED, LOWEST, SHIFTS, SLOTS
from sfi_kernels.compiled import entry
from sfi_kernels.loops.vectors import (
    F32,
    FLOAT32,
    I32,
    MATH,
    Code,
    F,
    add_row,
    bits_of,
    dot,
    exp_row,
    inner,
    largest,
    scale_row,
    vector,
    widen,
)
from sfi_kernels.step_descriptor import ALLOWED_START, ALLOWED_STOP, FAST, LENGTH, MODE, QUERIES, SLOT

BLOCK = 1024  # keys whose logits stay in the cache from word to word

HALF = np.array([2.0 ** (width - 1) for width in BITS], F)
SHIFT = np.array(SHIFTS, np.uint32)
MASK = np.array([(2**width - 1) << shift for width, shift in zip(BITS, SHIFTS, strict=True)], np.uint32)
MASK = MASK.view(np.int32)
UNIT = np.array([2.0**-shift for shift in SHIFTS], F) * np.where(MASK < 0, F(-1), F(1))


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
        packed = np.uint32(0)
        for s in range(SLOTS):
            level = np.floor(step[s * W + w]) + HALF[s]
            level = min(max(level, F(0)), F(2) * HALF[s] - F(1))
            packed |= np.uint32(level) << SHIFT[s]
        word[w] = np.int32(packed)


@inner
def _code(key, mean, encode_WDC, centered, word):
    W = len(word)
    channel, step = np.empty(SLOTS, F), np.empty(SLOTS * W, F)
    _less(key, mean, centered)
    for w in range(W):
        _project(centered, encode_WDC[w], channel)
        for s in range(SLOTS):
            step[s * W + w] = channel[s]
    _pack(step, word)


@entry
def pack_levels(step_HTC, word_HWT):
    """Make words of keys' channels, float32, in steps."""
    for h in range(step_HTC.shape[0]):
        for t in range(step_HTC.shape[1]):
            _pack(step_HTC[h, t], word_HWT[h, :, t])


def _write_scores(code: Code) -> None:
    b, (place, first, n) = code.builder, (code.args[1], code.args[4], code.args[5])
    word_p, factor_p, logit_p = code.pointer(0, I32), code.pointer(2, F32), code.pointer(3, F32)
    queries, length = code.size(3, 0), code.size(3, 1)

    def keys(at: Any, width: int, query: Any, count: int) -> None:
        wide = vector(F32, width)
        words = code.load(word_p, b.add(place, at), vector(I32, width), 4)
        rows = [b.add(query, code.count(q)) for q in range(count)]
        starts = [b.gep(logit_p, [b.add(b.mul(row, length), b.add(first, at))]) for row in rows]
        starts = [b.bitcast(start, wide.as_pointer()) for start in starts]
        sums = [b.load(start, align=4) for start in starts]
        for s in range(SLOTS):
            level = b.sitofp(b.and_(words, ir.Constant(words.type, [int(MASK[s])] * width)), wide)
            for q, row in enumerate(rows):
                factor = code.load(factor_p, b.add(b.mul(row, code.count(SLOTS)), code.count(s)), F32, 4)
                sums[q] = b.fadd(sums[q], b.fmul(code.spread(factor, width), level, flags=MATH), flags=MATH)
        for start, total in zip(starts, sums, strict=True):
            b.store(total, start, align=4)

    def group(query: Any, count: int) -> None:
        whole = b.and_(n, code.count(-16))
        with code.loop(b.udiv(n, code.count(16))) as part:
            keys(b.mul(part.index, code.count(16)), 16, query, count)
        with code.loop(b.sub(n, whole)) as rest:
            keys(b.add(whole, rest.index), 1, query, count)

    with code.loop(b.udiv(queries, code.count(2))) as two:
        group(b.mul(two.index, code.count(2)), 2)
    with b.if_then(b.trunc(queries, ir.IntType(1))):
        group(b.sub(queries, code.count(1)), 1)


@intrinsic
def _add_scores(context: Any, word_X: Any, place: Any, factor_GS: Any, logits_GT: Any, first: Any, n: Any) -> Any:
    """Add what `n` words from `place` on say of keys to the logits from `first` on; two queries share a word's levels.

    The levels stay where they lie in the word, as signed numbers: `factor_GS` brings them back to 0, 1, 2, ...
    """

    def generate(*given: Any) -> Any:
        _write_scores(Code(*given))
        return given[0].get_dummy_value()

    return types.void(word_X, types.int64, factor_GS, logits_GT, types.int64, types.int64), generate


@inner
def _scan(query_GD, word_X, begin, stride, mean, query_WCD, scale, logits_GT):
    # score a head's keys by their words, which lie from `begin` of `word_X` on
    (G, T), W = logits_GT.shape, len(query_WCD)
    factor, constant = np.empty((W, G, SLOTS), F), np.empty(G, F)
    for g in range(G):
        constant[g] = dot(query_GD[g], mean) * scale
        for w in range(W):
            for s in range(SLOTS):
                scaled = dot(query_GD[g], query_WCD[w, s]) * scale
                constant[g] += scaled * (F(0.5) - HALF[s])
                factor[w, g, s] = scaled * UNIT[s]
    for first in range(0, T, BLOCK):
        n = min(BLOCK, T - first)
        for g in range(G):
            logits_GT[g, first : first + n] = constant[g]
        for w in range(W):
            _add_scores(word_X, begin + w * stride + first, factor[w], logits_GT, first, n)


@inner
def _count(score, least):
    n = F(0)  # of floats, which become vectors; exact up to 2^24
    for i in range(len(score)):
        n += F(1) if score[i] >= least else F(0)
    return np.int64(n)


@inner
def _coarsen(score):
    for i in range(len(score)):
        level = (bits_of(score[i]) >> np.int32(DROPPED)) - np.int32(LOWEST)
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
    unread[0], unread[1] = total, least / largest(score)


@inner
def _choose(logits_GT, rest, index, unread_logit, unread):
    # the likeliest of more than K keys; overwrites the logits; a tie goes to the lower position
    (G, T), K = logits_GT.shape, len(index)
    score, place = np.zeros(T, F), np.empty(T, np.int32)
    total, log_sum = np.empty(G, F), np.empty(G, F)
    for g in range(G):
        most = largest(logits_GT[g])
        total[g] = exp_row(logits_GT[g], most)
        log_sum[g] = most + F(math.log(total[g]))
        add_row(logits_GT[g], F(1) / (total[g] * F(G)), score)
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


@inner
def _read(rows, half_rows, kind, row, wide):
    # a row of pages, as float32
    if kind == FLOAT32:
        for i in range(len(wide)):
            wide[i] = rows[row, i]
    else:
        widen(kind, half_rows[row], wide)


@inner
def _row(table, t, H, h, N, pitch):
    row = (np.uint64(table[t // N]) * np.uint64(H) + np.uint64(h)) * np.uint64(N) + np.uint64(t % N)
    return row * np.uint64(pitch)


@entry
def code_scan(
    begin, end, query_BHGD, key_XD, value_XE, half_key_XD, half_value_XE, pitch, kind, N, table_BP, step_BX, mean_BHD,
    encode_BHWDC, query_BHWCD, word_BHWT, sum_BHE, summed_BH, position_BHS, length_BH, index_BHK, logit_BHG,
    value_BHE, unread_BHC, scale, rest,
):  # fmt: skip
    """Code new keys, and choose for the fast requests; `code_scan.reference` has the arguments."""
    (_, H, W, T), K = word_BHWT.shape, index_BHK.shape[2]
    key, value = np.empty(mean_BHD.shape[2], F), np.empty(sum_BHE.shape[2], F)
    centered, words = np.empty(len(key), F), word_BHWT.reshape(word_BHWT.size)
    for b in range(len(step_BX)):
        mode, first, stop = step_BX[b, MODE], step_BX[b, ALLOWED_START], step_BX[b, ALLOWED_STOP]
        slot = np.int64(step_BX[b, SLOT])  # the row of what is kept
        if mode < FAST or slot < 0:
            continue
        n = max(stop - first, 0)
        logits = np.empty((query_BHGD.shape[2], n if n > K else 0), F)
        for h in range(begin, end):
            for t in range(step_BX[b, LENGTH] - step_BX[b, QUERIES], step_BX[b, LENGTH]):
                _read(key_XD, half_key_XD, kind, _row(table_BP[b], t, H, h, N, pitch), key)
                _code(key, mean_BHD[slot, h], encode_BHWDC[slot, h], centered, word_BHWT[slot, h, :, t])
            if mode != FAST:
                continue
            known = summed_BH[slot, h]
            if known == 0:
                known = first
                scale_row(sum_BHE[slot, h], F(0))
            for t in range(known, stop):
                _read(value_XE, half_value_XE, kind, _row(table_BP[b], t, H, h, N, pitch), value)
                add_row(value, F(1), sum_BHE[slot, h])
            summed_BH[slot, h] = max(known, stop)
            add_row(sum_BHE[slot, h], F(1) / F(max(1, max(known, stop) - first)), value_BHE[b, h])
            index = index_BHK[b, h]
            if n > K:
                begin_X = (slot * H + h) * W * T + first
                _scan(query_BHGD[b, h], words, begin_X, T, mean_BHD[slot, h], query_BHWCD[slot, h], scale, logits)
                _choose(logits, rest, index, logit_BHG[b, h], unread_BHC[b, h])
            position = position_BHS[slot, h]  # the sinks, the chosen positions, and -1
            for i in range(len(position)):
                position[i] = i if i < first else -1
            for i in range(min(n, K)):
                index[i] = first + (index[i] if n > K else i)
                position[first + i] = index[i]
            length_BH[slot, h] = first + min(n, K)
