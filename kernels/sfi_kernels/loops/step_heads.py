"""Heads in a compiled step: stored, chosen for, and attended with, long ones in parts."""

import numpy as np
from numba import carray

from sfi_kernels.code_scan.codes import KEPT, SLOTS
from sfi_kernels.compiled import by_address
from sfi_kernels.loops import views
from sfi_kernels.loops.attention import end_head, start_head
from sfi_kernels.loops.codes import code_scan
from sfi_kernels.loops.products import at_float32, at_int32, at_int64, at_uint16
from sfi_kernels.loops.rows import TILE
from sfi_kernels.loops.vectors import F, add_row, bits_of, dot, exp, inner
from sfi_kernels.loops.views import blocks, copy, floats, page_row, pages, put, requests, rms_norm, row_of, take, vector
from sfi_kernels.step_descriptor import ALLOWED_STOP, EVIDENCE, FAST, LENGTH, MODE, QUERIES, SLOW
from sfi_kernels.tables import LAYER_WORDS, STEP_WORDS, Layer, Real, Step

REALS = len(Real)


@inner
def _rotate(x, cos, sin):
    half = len(x) // 2
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i + half] + a * sin[i + half]


@inner
def store(step, layer, real, h):
    # norm and rotate a KV head's queries and keys, append its keys and values, and choose
    H, G, D, X = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], step[Step.TOKENS]
    kind, step_BX = step[Step.KIND], requests(step)
    key_YD, value_YD, half_key_YD, half_value_YD = pages(step, layer, Layer.KEYS, Layer.VALUES)
    turns = 4 * layer[Layer.ROTATION] * X * D
    cos_XD, sin_XD = floats(step[Step.COS] + turns, X, D), floats(step[Step.SIN] + turns, X, D)
    made_XO = floats(step[Step.MADE_XO], X, (H * G + 2 * H) * D)
    last_BHGD = carray(at_float32(step[Step.LAST_BHGD]), (len(step_BX), H, G, D))
    norm_Y, x = vector(layer[Layer.NORMS], 1 << 40), 0
    for b in range(len(step_BX)):
        for w in range(step_BX[b, QUERIES]):
            for j in range(G + 1):
                at = (h * G + j if j < G else H * G + h) * D
                head = made_XO[x, at : at + D]
                norm = layer[Layer.QUERY_NORM if j < G else Layer.KEY_NORM]
                if norm != 0:
                    rms_norm(head, vector(norm, D), real[Real.HEAD_EPS], head)
                _rotate(head, cos_XD[x], sin_XD[x])
                if j < G:
                    copy(head, last_BHGD[b, h, j])  # the last token's stays
            key = made_XO[x, (H * G + h) * D : (H * G + h + 1) * D]
            value = made_XO[x, (H * G + H + h) * D : (H * G + H + h + 1) * D]
            to = row_of(step, layer, b, h, step_BX[b, LENGTH] - step_BX[b, QUERIES] + w)
            norm_Y[to] = np.sqrt(dot(key, key))
            put(kind, key, key_YD, half_key_YD, to)
            put(kind, value, value_YD, half_value_YD, to)
            x += 1
        if layer[Layer.QUERIES] != 0:
            for g in range(G):
                copy(last_BHGD[b, h, g], vector(layer[Layer.QUERIES] + 4 * ((b * H + h) * G + g) * D, D))


@by_address
def choose(arguments):
    """Keep the fast requests' queries, code the new keys of a KV head, and choose."""
    a = carray(at_int64(arguments), (4,))
    step, layer = carray(at_int64(a[0]), (STEP_WORDS,)), carray(at_int64(a[1]), (LAYER_WORDS,))
    real, h = carray(at_float32(a[2]), (REALS,)), a[3]
    H, G, D, N = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], step[Step.PAGE]
    step_BX, B, W, T, S = requests(step), step[Step.REQUESTS], step[Step.WORDS], layer[Layer.CODED], layer[Layer.ROWS]
    K, kind = step[Step.BUDGET], step[Step.KIND]
    key_YD, value_YD, half_key_YD, half_value_YD = pages(step, layer, Layer.KEYS, Layer.VALUES)
    last_BHGD = carray(at_float32(step[Step.LAST_BHGD]), (B, H, G, D))
    float_ring = floats(layer[Layer.CODE_RECENT], 1 << 40, D)
    half_ring = carray(at_uint16(layer[Layer.CODE_RECENT]), (1 << 40, D))
    logit_BHG = carray(at_float32(step[Step.LOGIT_BHG]), (B, H, G))
    mean_BHE = carray(at_float32(step[Step.MEAN_BHE]), (B, H, D))
    index_BHK = carray(at_int32(layer[Layer.CHOICE]), (B, H, K))
    unread_BHC = carray(at_float32(layer[Layer.UNREAD]), (B, H, 2 if step[Step.DIAGNOSES] else 0))
    for b in range(B):
        logit_BHG[b, h], mean_BHE[b, h], index_BHK[b, h] = F(-np.inf), F(0), -1
        if step[Step.DIAGNOSES]:
            unread_BHC[b, h, 0], unread_BHC[b, h, 1] = F(0), F(np.nan)
        if step_BX[b, MODE] == FAST:
            place = ((b * H + h) * KEPT + (step_BX[b, LENGTH] - 1) % KEPT) * G
            for g in range(G):
                put(kind, last_BHGD[b, h, g], float_ring, half_ring, place + g)
    code_scan(
        h, h + 1, last_BHGD, key_YD, value_YD, half_key_YD, half_value_YD, 1, kind, N, blocks(step), step_BX,
        carray(at_float32(layer[Layer.CODE_MEAN]), (B, H, D)),
        carray(at_float32(layer[Layer.CODE_ENCODE]), (B, H, W, D, SLOTS)),
        carray(at_float32(layer[Layer.CODE_QUERY]), (B, H, W, SLOTS, D)),
        carray(at_int32(layer[Layer.CODE_WORD]), (B, H, W, T)),
        carray(at_float32(layer[Layer.CODE_SUM]), (B, H, D)), carray(at_int32(layer[Layer.CODE_SUMMED]), (B, H)),
        carray(at_int32(layer[Layer.POSITIONS]), (B, H, S)), carray(at_int32(layer[Layer.LENGTHS]), (B, H)),
        index_BHK, logit_BHG, mean_BHE, unread_BHC,
        real[Real.SCALE], real[Real.REST],
    )  # fmt: skip


@inner
def make_scratch(step):
    # of attention, for one thread
    Q, D = step[Step.QUERIES] * step[Step.GROUP], step[Step.WIDTH]
    query_QD, room_QT, out_QD = np.empty((Q, D), F), np.empty((Q, TILE), F), np.empty((Q, D), F)
    row_T = np.empty(step[Step.LONGEST] + TILE, np.int64)
    return query_QD, room_QT, np.empty(Q, F), np.empty(Q, F), out_QD, row_T, np.empty(views.SIZES, np.int64)


@inner
def _parts(step, dense, length, threads):
    # of a request's heads: several of those that read everything, so that all threads have work
    return max(1, min(2 * threads, length // step[Step.PART])) if dense and threads > 1 else 1


@inner
def attend(step, layer, real, work, scratch):
    # heads of requests, in parts
    threads, sync, ticket, _ = work
    H, step_BX, turn = step[Step.HEADS], requests(step), np.int64(0)
    item = take(sync, ticket, threads, turn)
    place, first = np.int64(0), np.int64(0)  # of the request's items, and its tokens
    for b in range(len(step_BX)):
        W = step_BX[b, QUERIES]
        dense = layer[Layer.LEFT_DENSE] != 0 or step_BX[b, MODE] == SLOW
        parts = _parts(step, dense, step_BX[b, LENGTH], threads)
        while W and item < place + H * parts:
            h, part = (item - place) // parts, (item - place) % parts
            _attend_head(step, layer, real, b, h, first, part, parts, item, dense, scratch)
            turn += 1
            item = take(sync, ticket, threads, turn)
        if W:
            place += H * parts
        first += W


@inner
def _read_all(step, layer, cap, b, h, part, parts, Q, scratch):
    # a part of all tokens that the queries of a request see, causally; its last one's logits are the evidence
    H, G, step_BX, row_T = step[Step.HEADS], step[Step.GROUP], requests(step), scratch[5]
    W = step_BX[b, QUERIES]
    seen = step_BX[b, LENGTH] - W + 1  # by all queries
    low = max(seen - layer[Layer.WINDOW], 0) if layer[Layer.WINDOW] else np.int64(0)
    begin, end = low + (seen - low) * part // parts, low + (seen - low) * (part + 1) // parts
    evidence = np.int64(0)
    if layer[Layer.EVIDENCE] != 0 and layer[Layer.LEFT_DENSE] == 0:
        evidence = layer[Layer.EVIDENCE] + 4 * (step_BX[b, EVIDENCE] * H + h) * G * step[Step.LONGEST]
    for t in range(begin, end):
        row_T[t - begin] = row_of(step, layer, b, h, t)
    _read(step, layer, Layer.KEYS, cap, row_T, end - begin, 0, Q, evidence, begin, scratch)
    for w in range(1, W if part == parts - 1 else 0):  # what only later queries see
        row_T[0] = row_of(step, layer, b, h, seen - 1 + w)
        _read(step, layer, Layer.KEYS, cap, row_T, 1, w * G, Q - w * G, evidence, seen - 1 + w, scratch)


@inner
def _read_chosen(step, layer, cap, b, h, Q, scratch):
    # sinks and selected tokens, in their pages or packed, and the recent ones
    H, N, S, row_T, step_BX = step[Step.HEADS], step[Step.PAGE], layer[Layer.ROWS], scratch[5], requests(step)
    block_P, count = blocks(step)[b], np.int64(0)
    chosen = np.int64(carray(at_int32(layer[Layer.LENGTHS]), (step[Step.REQUESTS], H))[b, h])
    if step[Step.IN_PLACE]:
        position_S = carray(at_int32(layer[Layer.POSITIONS]), (step[Step.REQUESTS], H, S))[b, h]
        for i in range(chosen):
            row_T[i] = page_row(block_P, H, h, N, position_S[i])
        count = chosen
    else:
        for i in range(chosen):
            row_T[i] = (b * H + h) * S + i
        _read(step, layer, Layer.PACKED_KEYS, cap, row_T, chosen, 0, Q, 0, 0, scratch)
    for t in range(step_BX[b, ALLOWED_STOP], step_BX[b, LENGTH]):
        row_T[count] = page_row(block_P, H, h, N, t)
        count += 1
    _read(step, layer, Layer.KEYS, cap, row_T, count, 0, Q, 0, 0, scratch)


@inner
def _attend_head(step, layer, real, b, h, first, part, parts, item, dense, scratch):
    query_QD, _, most_Q, total_Q, out_QD, _, _ = scratch
    H, G, D, step_BX, cap = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], requests(step), real[Real.CAP]
    W = step_BX[b, QUERIES]
    made_XO = floats(step[Step.MADE_XO], step[Step.TOKENS], (H * G + 2 * H) * D)
    for w in range(W):
        for g in range(G):
            at = (h * G + g) * D
            for d in range(D):
                query_QD[w * G + g, d] = made_XO[first + w, at + d] * real[Real.SCALE]
    Q = W * G
    most, total, out = most_Q[:Q], total_Q[:Q], out_QD[:Q]
    start_head(most, total, out)
    if dense:
        _read_all(step, layer, cap, b, h, part, parts, Q, scratch)
    else:
        _read_chosen(step, layer, cap, b, h, Q, scratch)
    if parts > 1:
        rows = item * step[Step.QUERIES] * G
        part_QD = floats(step[Step.PART_IQD] + 4 * rows * D, Q, D)
        most_all, total_all = vector(step[Step.MOST_IQ] + 4 * rows, Q), vector(step[Step.SUM_IQ] + 4 * rows, Q)
        for q in range(Q):
            copy(out[q], part_QD[q])
            most_all[q], total_all[q] = most[q], total[q]
        return
    chooses = step[Step.CHOOSES] != 0 and not dense
    logit = vector(step[Step.LOGIT_BHG] + 4 * (b * H + h) * G, G if chooses else 0)
    mean = vector(step[Step.MEAN_BHE] + 4 * (b * H + h) * D, D if chooses else 0)
    end_head(logit[:0], logit, mean, most, total, out)
    out_XO = floats(step[Step.OUT_XO], step[Step.TOKENS], H * G * D)
    for q in range(Q):
        at = (h * G + q % G) * D
        copy(out[q], out_XO[first + q // G, at : at + D])


@inner
def _read(step, layer, keys, cap, row_T, count, first, queries, evidence, column, scratch):
    # rows of pages or of the packed segment, by queries from `first` on; the last ones' logits are the evidence
    query_QD, room_QT, most_Q, total_Q, out_QD, _, a = scratch
    a[views.KEYS], a[views.VALUES] = layer[keys], layer[keys + 1]
    a[views.NUMBERS], a[views.COUNT], a[views.QUERIES] = row_T.ctypes.data, count, queries
    a[views.QUERY], a[views.WIDTH], a[views.CAP] = query_QD[first:].ctypes.data, step[Step.WIDTH], bits_of(cap)
    a[views.ROOM], a[views.MOST] = room_QT.ctypes.data, most_Q[first:].ctypes.data
    a[views.TOTAL], a[views.OUT] = total_Q[first:].ctypes.data, out_QD[first:].ctypes.data
    a[views.LOGITS], a[views.LOGITS_WIDTH] = evidence + 4 * column, step[Step.LONGEST]
    a[views.WRITTEN] = step[Step.GROUP] if evidence != 0 else 0
    views.call(step[Step.READ], a.ctypes.data)


@inner
def join_parts(step, layer, threads, out_XO):
    # copy the attention's output, and join what was attended in parts
    H, G, D, step_BX = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], requests(step)
    shared_XO = floats(step[Step.OUT_XO], step[Step.TOKENS], H * G * D)
    place, first = np.int64(0), np.int64(0)
    for b in range(len(step_BX)):
        W = step_BX[b, QUERIES]
        dense = layer[Layer.LEFT_DENSE] != 0 or step_BX[b, MODE] == SLOW
        parts = _parts(step, dense, step_BX[b, LENGTH], threads)
        for w in range(W):
            if parts == 1:
                copy(shared_XO[first + w], out_XO[first + w])
                continue
            for head in range(H * G):
                rows = (place + head // G * parts) * step[Step.QUERIES] * G + w * G + head % G
                _join(step, rows, step[Step.QUERIES] * G, parts, D, out_XO[first + w, head * D : head * D + D])
        if W:
            place += H * parts
        first += W


@inner
def _join(step, row, stride, parts, D, out_D):
    # a query's parts, whose rows lie `stride` apart
    most, total = F(-np.inf), F(0)
    for part in range(parts):
        most = max(most, vector(step[Step.MOST_IQ] + 4 * (row + part * stride), 1)[0])
    for part in range(parts):
        at = row + part * stride
        total += vector(step[Step.SUM_IQ] + 4 * at, 1)[0] * exp(vector(step[Step.MOST_IQ] + 4 * at, 1)[0] - most)
    for d in range(D):
        out_D[d] = 0
    for part in range(parts):
        at = row + part * stride
        weight = exp(vector(step[Step.MOST_IQ] + 4 * at, 1)[0] - most) / total
        add_row(vector(step[Step.PART_IQD] + 4 * at * D, D), weight, out_D)
