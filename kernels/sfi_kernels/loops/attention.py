"""Attention to rows of pages, where they lie."""

import numpy as np

from sfi_kernels.compiled import entry
from sfi_kernels.loops.vectors import FLOAT32, F, add_row, dot, exp, exp_row, inner, largest, prefetch, scale_row, widen

AHEAD = 16  # rows of keys that are fetched before their turn
ROWS = 8  # rows whose values are added at once
EACH = np.arange(ROWS).astype(np.uint64)


@inner
def _bend(x, cap):
    # to cap times tanh of x by cap
    for i in range(len(x)):
        shrunk = exp(F(-2) * abs(x[i] / cap))
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
    most = max(largest(x), logit, sink)
    share = exp(logit - most)
    total = exp_row(x, most) + share + exp(sink - most)
    scale_row(x, F(1) / total)
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
        prefetch(key, row[min(i + AHEAD, n - 1)])
        prefetch(value, row[i])
        for g in range(len(query)):
            p[g, i] = dot(query[g], key[row[i]]) * scale


@inner
def _products_16(query, key, value, kind, row, n, scale, p, wide):
    for i in range(n):
        prefetch(key, row[min(i + AHEAD, n - 1)])
        prefetch(value, row[i])
        widen(kind, key[row[i]], wide)
        for g in range(len(query)):
            p[g, i] = dot(query[g], wide) * scale


@inner
def _sum_values(value, row, n, p, out):
    for first in range(0, n, ROWS):
        for g in range(len(out)):
            _add_rows(value, row[first : first + ROWS], p[g, first : first + ROWS], out[g])


@inner
def _sum_values_16(value, kind, row, n, p, wide, out):
    for first in range(0, n, ROWS):
        for i in range(ROWS):
            widen(kind, value[row[first + i]], wide[i])
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
                    add_row(pseudo_value_BHE[b, h], share, out[g])
            if kind == FLOAT32:
                _sum_values(value_XE, row, n, p, out)
            else:
                _sum_values_16(half_value_XE, kind, row, n, p, wide_values, out)
