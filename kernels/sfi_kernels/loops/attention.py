"""Attention to rows of pages, where they lie: a running softmax over rows by number.

For one KV head of a request: `start_head`, `read_rows` for each set of rows, `end_head`. By query `most` is the largest
logit so far, `total` and `out` are the sums of weights and of weighted values, relative to it.
"""

import numpy as np

from sfi_kernels.compiled import entry
from sfi_kernels.loops.rows import TILE, add_values, products
from sfi_kernels.loops.vectors import F, add_row, exp, inner, largest, scale_row

LEAST = F(-1e30)  # a largest logit before the first row; finite, so that logits of -inf weigh nothing


@inner
def _bend(x, cap):
    # to cap times tanh of x by cap
    for i in range(TILE):
        shrunk = exp(F(-2) * abs(x[i] / cap))
        bent = cap * (F(1) - shrunk) / (F(1) + shrunk)
        x[i] = bent if x[i] >= F(0) else -bent


@inner
def _weigh(x, n, most, total, out):
    # a tile's logits to weights, in place; returns the new largest logit and sum, and scales the sums so far
    for i in range(n, TILE):
        x[i] = F(-np.inf)
    high = max(most, largest(x))
    shrink, added = exp(most - high), F(0)
    for i in range(TILE):
        x[i] = exp(x[i] - high)
        added += x[i]
    if shrink != F(1):
        scale_row(out, shrink)
    return high, total * shrink + added


@inner
def start_head(most_Q, total_Q, out_QE):
    """Begin the attention of Q queries of a KV head."""
    most_Q[:] = LEAST
    total_Q[:] = 0
    out_QE[:] = 0


@inner
def read_rows(
    kind, key_XD, value_XE, half_key_XD, half_value_XE, row_T, n, query_QD, cap, room_QT, most_Q, total_Q, out_QE,
    logits_QT,
):  # fmt: skip
    """Attend to the first `n` rows of `row_T`, int64, in pages of a `kind`, with scaled queries.

    No cap is 0. `room_QT` is scratch of TILE numbers a query. Of as many of the last queries as `logits_QT` has rows,
    their logits are written there. All arrays but the logits are contiguous.
    """
    Q, row = len(query_QD), row_T[:n]
    for start in range(0, n, TILE):
        count = min(TILE, n - start)
        products(kind, key_XD, half_key_XD, row, start, count, query_QD, room_QT)
        if cap > F(0):
            for q in range(Q):
                _bend(room_QT[q], cap)
        for q in range(len(logits_QT)):
            for i in range(count):
                logits_QT[q, start + i] = room_QT[Q - len(logits_QT) + q, i]
        for q in range(Q):
            most_Q[q], total_Q[q] = _weigh(room_QT[q], count, most_Q[q], total_Q[q], out_QE[q])
        add_values(kind, value_XE, half_value_XE, row, start, count, room_QT, out_QE)


@inner
def end_head(sink_Q, pseudo_logit_Q, pseudo_value_E, most_Q, total_Q, out_QE):
    """Divide by the sums, of learned sinks and the pseudo token too where their arrays are not empty."""
    for q in range(len(out_QE)):
        logit, sink = F(-np.inf), F(-np.inf)
        if len(pseudo_logit_Q):
            logit = pseudo_logit_Q[q]
        if len(sink_Q):
            sink = sink_Q[q]
        high = max(most_Q[q], logit, sink)
        shrink, share = exp(most_Q[q] - high), exp(logit - high)
        total = total_Q[q] * shrink + share + exp(sink - high)
        if total == F(0):  # no row
            continue
        scale_row(out_QE[q], shrink / total)
        if share > F(0):
            add_row(pseudo_value_E, share / total, out_QE[q])


@inner
def rows_of_positions(position, start, stop, table, H, h, N, pitch, row):
    """Write the numbers of the rows of pages that hold packed tokens and a range of recent ones; return how many."""
    n = len(position)
    for i in range(n):
        row[i] = position[i]
        if np.uint32(position[i]) >= np.uint32(stop):
            raise IndexError("a packed position lies beyond the cached tokens")
    for i in range(stop - start):
        row[n + i] = start + i
    n += stop - start
    if len(table) == 1:
        first = (np.int64(table[0]) * H + h) * N
        for i in range(n):
            row[i] += first
    else:
        for i in range(n):
            slot = np.int64(np.uint32(row[i]) // np.uint32(N))
            row[i] += ((np.int64(table[slot]) * H + h) - slot) * N
    if pitch > 1:
        for i in range(n):
            row[i] *= pitch
    return n


@entry
def attend(
    begin, end, query_BHWGD, pages, segment, kind, N, S, slot_B, position_BHS, length_BH, table_BP, start_B, stop_B,
    scale, cap, sink_HG, pseudo_logit_BHG, pseudo_value_BHE, out_BHWGE, logits_BHGT,
):  # fmt: skip
    """Attend to packed rows and a range of recent tokens with the last W tokens' queries, causally.

    `pages` and `segment` are of `compiled.pages_of`; `kind` says which of their rows count. Packed, by slot, are
    positions in the pages, or if `S` is not 0 rows of a segment of S rows a head; slot -1 has none. No cap is 0, no
    sink and no pseudo token an empty array; logits of the last token's queries are written where there is room.
    """
    B, H, W, G, D = query_BHWGD.shape
    Q, longest = W * G, 0
    for b in range(B):
        longest = max(longest, S + position_BHS.shape[2] + stop_B[b] - start_B[b])
    query, room, row = np.empty((Q, D), F), np.empty((Q, TILE), F), np.empty(longest, np.int64)
    most, total, nothing = np.empty(Q, F), np.empty(Q, F), np.empty(0, F)
    key, value, half_key, half_value, pitch = pages
    packed_key, packed_value, half_packed_key, half_packed_value, packed_pitch = segment
    for b in range(B):
        for h in range(begin, end):
            tokens = min(W, stop_B[b]) if W > 1 else 1  # the others are padding
            first = (W - tokens) * G
            for w in range(W):
                for g in range(G):
                    for d in range(D):
                        query[w * G + g, d] = query_BHWGD[b, h, w, g, d] * scale
            out = out_BHWGE[b, h].reshape(Q, out_BHWGE.shape[4])
            logits = logits_BHGT[b, h, :, 0:] if len(logits_BHGT) else room[:0, 0:]
            start_head(most, total, out)
            slot = np.int64(slot_B[b])
            packed = length_BH[slot, h] if slot >= 0 else np.int32(0)
            if S > 0:
                for i in range(packed):
                    row[i] = ((slot * H + h) * S + i) * packed_pitch
                read_rows(
                    kind, packed_key, packed_value, half_packed_key, half_packed_value, row, packed, query, cap, room,
                    most, total, out, room[:0, 0:],
                )  # fmt: skip
                packed = 0
            position = position_BHS[max(slot, 0), h, :packed]
            n = rows_of_positions(position, start_B[b], stop_B[b], table_BP[b], H, h, N, pitch, row)
            shared = n - max(tokens - 1, 0)
            for w in range(
                max(tokens, 1)
            ):  # all queries read what the first token's see, then each up to its own token
                place, count = (shared, w) if w else (0, shared)
                low, high = first + w * G, first + (w + 1) * G if w else Q
                written = logits[:, place:] if w in (0, tokens - 1) else logits[:0, 0:]
                read_rows(
                    kind, key, value, half_key, half_value, row[place:], count, query[low:high], cap, room,
                    most[low:high], total[low:high], out[low:high], written,
                )  # fmt: skip
            sink = sink_HG[h] if len(sink_HG) else nothing
            pseudo_logit = pseudo_logit_BHG[b, h] if len(pseudo_logit_BHG) else nothing
            pseudo_value = pseudo_value_BHE[b, h] if len(pseudo_logit_BHG) else nothing
            for start in range(first, Q, G):
                group = slice(start, start + G)
                end_head(sink, pseudo_logit, pseudo_value, most[group], total[group], out[group])
