"""A decoding step as one compiled call a thread: layers `first` to `last` - 1 in stages, threads meet at barriers.

A stage's work is divided into pieces, which threads take one by one: so a thread that another process disturbs takes
fewer. What all need, a norm or the sum of two rows, each thread computes for itself.

    project  norm, queries, keys, values
    store    norm and rotate heads, append keys and values, choose by codes
    attend   heads of requests, long ones in parts
    output   projection of the attention's output
    gate     sum, norm, the gated projections
    down     the MLP's last projection
"""

from platform import machine
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from sfi_kernels.code_scan.codes import KEPT, SLOTS
from sfi_kernels.compiled import by_address, entry
from sfi_kernels.loops import calls
from sfi_kernels.loops.attention import end_head, start_head
from sfi_kernels.loops.calls import call
from sfi_kernels.loops.codes import code_scan
from sfi_kernels.loops.products import at_float32, at_int16, at_int32, at_int64, at_uint16, round_row
from sfi_kernels.loops.rows import TILE
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT32, F, add_row, bits_of, dot, exp, inner
from sfi_kernels.matrix import BLOCK, KIND, OUT, SIZE
from sfi_kernels.step_descriptor import ALLOWED_STOP, FAST, LENGTH, MODE, QUERIES, SLOW, WORDS, EVIDENCE
from sfi_kernels.step_tables import (
    DOWN,
    GATE,
    LAYER_WORDS,
    OUTPUT,
    QUERY,
    STEP_WORDS,
    TICKETS,
    UP,
    VALUE,
    Layer,
    Real,
    Step,
)

PATIENCE = 2000  # looks at a barrier until a thread lets others run
PIECES = 8  # of a product, for each thread
PART = 512  # tokens of a part of dense attention, at least
STAGES = 6
REALS = len(Real)


# --- threads


@intrinsic
def _add_one(context: Any, counters: Any, place: Any) -> Any:
    """Add 1 to a counter at once for all threads; return what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = builder.gep(builder.bitcast(array.data, ir.IntType(64).as_pointer()), [args[1]])
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counters, types.int64), generate


@intrinsic
def _look(context: Any, counters: Any) -> Any:
    """Return the first counter as other threads have left it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.load_atomic(builder.bitcast(array.data, ir.IntType(64).as_pointer()), "acquire", 8)

    return types.int64(counters), generate


@intrinsic
def _pause(context: Any) -> Any:
    """Leave the core's resources to its other thread for a moment."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=kind), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _yield(context: Any) -> Any:
    """Let another thread have the core."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@inner
def _meet(sync, threads, met):
    # wait until all threads have come; returns how many arrivals there are then
    met += threads
    if threads > 1:
        _add_one(sync, np.int64(0))
        looks = 0
        while _look(sync) < met:
            _pause()
            looks += 1
            if looks > PATIENCE:
                _yield()
    return met


# --- rows


@inner
def _norm(x, weight, eps, out):
    total = F(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = F(1) / np.sqrt(total / F(len(x)) + eps)
    for i in range(len(x)):
        out[i] = weight[i] * (x[i] * factor)


@inner
def _copy(x, y):
    for i in range(len(x)):
        y[i] = x[i]


@inner
def _rotate(x, cos, sin):
    half = len(x) // 2
    for i in range(half):
        a, b = x[i], x[i + half]
        x[i] = a * cos[i] - b * sin[i]
        x[i + half] = b * cos[i + half] + a * sin[i + half]


@inner
def _silu(gate, up):
    for i in range(len(gate)):
        e = exp(-abs(gate[i]))
        gate[i] = gate[i] * ((F(1) if gate[i] >= F(0) else e) / (F(1) + e)) * up[i]


@inner
def _gelu(gate, up):
    for i in range(len(gate)):
        y = F(0.7978845608) * (gate[i] + F(0.044715) * gate[i] * gate[i] * gate[i])
        e = exp(F(-2) * abs(y))
        tanh = (F(1) - e) / (F(1) + e)
        gate[i] = F(0.5) * gate[i] * (F(1) + (tanh if y >= F(0) else -tanh)) * up[i]


@intrinsic
def float16_of(context: Any, x: Any) -> Any:
    """Return the bits of a float32 as float16, rounded to the nearest."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@inner
def bfloat16_of(x):
    bits = np.uint32(bits_of(x))
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@inner
def _narrow(kind, x, to):
    # to bfloat16, or float16, rounded to the nearest
    for i in range(len(x)):
        to[i] = bfloat16_of(x[i]) if kind == BFLOAT16 else float16_of(x[i])


# --- stages


@inner
def _floats(address, rows, width):
    return carray(at_float32(address), (rows, width))


@inner
def _vector(address, width):
    return carray(at_float32(address), (width,))


@inner
def _requests(step):
    return carray(at_int32(step[Step.STEP_BX]), (step[Step.REQUESTS], WORDS))


@inner
def _blocks(step):
    return carray(at_int32(step[Step.BLOCK_BP]), (step[Step.REQUESTS], step[Step.TABLE]))


@inner
def _pages(step, layer, keys, values):
    # keys and values as rows, of float32 and of 16 bits
    rows, D = 1 << 40, step[Step.WIDTH]  # no bound is checked
    return (
        carray(at_float32(layer[keys]), (rows, D)), carray(at_float32(layer[values]), (rows, D)),
        carray(at_uint16(layer[keys]), (rows, D)), carray(at_uint16(layer[values]), (rows, D)),
    )  # fmt: skip


@inner
def _page_row(block_P, H, h, N, place):
    return (np.int64(block_P[place // N]) * H + h) * N + place % N


@inner
def _piece(outputs, threads):
    # outputs of a piece of a product: whole blocks, so that what follows can round them
    return BLOCK * max(1, min(4, outputs // (threads * PIECES * BLOCK)))


@inner
def _multiply(step, matrix, begin, end, rows, out_RO, offset, arguments):
    # write outputs of a matrix from `offset` of the results on
    x_XI, q_XI, scale_XB, total_XB = rows
    a = arguments
    a[calls.MATRIX], a[calls.BEGIN], a[calls.END], a[calls.ROWS] = matrix.ctypes.data, begin, end, len(x_XI)
    a[calls.FLOATS], a[calls.ROUNDED] = x_XI.ctypes.data, q_XI.ctypes.data
    a[calls.SCALES], a[calls.TOTALS] = scale_XB.ctypes.data, total_XB.ctypes.data
    a[calls.RESULT], a[calls.RESULT_WIDTH] = out_RO.ctypes.data + 4 * offset, out_RO.shape[1]
    call(step[Step.PRODUCT], a.ctypes.data)


@inner
def _project(step, matrices, outputs, threads, sync, ticket, rows, out_XO, arguments):
    # matrices whose outputs follow each other
    piece, turn = _piece(outputs, threads), np.int64(0)
    while True:
        begin = piece * _take(sync, ticket, threads, turn)
        turn += 1
        if begin >= outputs:
            break
        end, offset = min(begin + piece, outputs), np.int64(0)
        for at in range(0, len(matrices), SIZE):
            matrix = matrices[at : at + SIZE]
            low, high = max(begin - offset, 0), min(end - offset, matrix[OUT])
            if low < high:
                _multiply(step, matrix, low, high, rows, out_XO, offset, arguments)
            offset += matrix[OUT]


@inner
def _matrices(layer, first, last):
    return layer[Layer.MATRICES + first * SIZE : Layer.MATRICES + (last + 1) * SIZE]


@inner
def _take(sync, ticket, threads, turn):
    # the number of the next piece; without other threads that is the turn
    return _add_one(sync, ticket) if threads > 1 else turn


@inner
def _round(x_XI, q_XI, scale_XB, total_XB):
    for x in range(len(x_XI)):
        round_row(x_XI[x], q_XI[x], scale_XB[x], total_XB[x])


@inner
def _add_back(x_XI, back_XI, norm, eps, row):
    # add a stage's results, normed where the layer norms them
    for x in range(len(x_XI)):
        if norm != 0:
            _norm(back_XI[x], _vector(norm, len(row)), eps, row)
            add_row(row, F(1), x_XI[x])
        else:
            add_row(back_XI[x], F(1), x_XI[x])


@inner
def _store(step, layer, real, h):
    # norm and rotate a KV head's queries and keys, append its keys and values, and choose
    H, G, D, N, X = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], step[Step.PAGE], step[Step.TOKENS]
    kind, step_BX, block_BP = step[Step.KIND], _requests(step), _blocks(step)
    key_YD, value_YD, half_key_YD, half_value_YD = _pages(step, layer, Layer.KEYS, Layer.VALUES)
    turns = 4 * layer[Layer.ROTATION] * X * D
    cos_XD, sin_XD = _floats(step[Step.COS] + turns, X, D), _floats(step[Step.SIN] + turns, X, D)
    made_XO = _floats(step[Step.MADE_XO], X, (H * G + 2 * H) * D)
    last_BHGD = carray(at_float32(step[Step.LAST_BHGD]), (len(step_BX), H, G, D))
    norm_Y, x = _vector(layer[Layer.NORMS], 1 << 40), 0
    for b in range(len(step_BX)):
        for w in range(step_BX[b, QUERIES]):
            for j in range(G + 1):
                at = (h * G + j if j < G else H * G + h) * D
                head = made_XO[x, at : at + D]
                norm = layer[Layer.QUERY_NORM if j < G else Layer.KEY_NORM]
                if norm != 0:
                    _norm(head, _vector(norm, D), real[Real.HEAD_EPS], head)
                _rotate(head, cos_XD[x], sin_XD[x])
                if j < G:
                    _copy(head, last_BHGD[b, h, j])  # the last token's stays
            key = made_XO[x, (H * G + h) * D : (H * G + h + 1) * D]
            value = made_XO[x, (H * G + H + h) * D : (H * G + H + h + 1) * D]
            to = _page_row(block_BP[b], H, h, N, step_BX[b, LENGTH] - step_BX[b, QUERIES] + w)
            norm_Y[to] = np.sqrt(dot(key, key))
            _put(kind, key, key_YD, half_key_YD, to)
            _put(kind, value, value_YD, half_value_YD, to)
            x += 1
        if layer[Layer.QUERIES] != 0:
            for g in range(G):
                _copy(last_BHGD[b, h, g], _vector(layer[Layer.QUERIES] + 4 * ((b * H + h) * G + g) * D, D))


@inner
def _put(kind, x, rows, half_rows, to):
    if kind == FLOAT32:
        _copy(x, rows[to])
    else:
        _narrow(kind, x, half_rows[to])


@by_address
def choose(arguments):
    """Keep the fast requests' queries, code the new keys of a KV head, and choose."""
    a = carray(at_int64(arguments), (4,))
    step, layer = carray(at_int64(a[0]), (STEP_WORDS,)), carray(at_int64(a[1]), (LAYER_WORDS,))
    real, h = carray(at_float32(a[2]), (REALS,)), a[3]
    H, G, D, N = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], step[Step.PAGE]
    step_BX, B, W, T, S = _requests(step), step[Step.REQUESTS], step[Step.WORDS], layer[Layer.CODED], layer[Layer.ROWS]
    K, kind = step[Step.BUDGET], step[Step.KIND]
    key_YD, value_YD, half_key_YD, half_value_YD = _pages(step, layer, Layer.KEYS, Layer.VALUES)
    last_BHGD = carray(at_float32(step[Step.LAST_BHGD]), (B, H, G, D))
    float_ring, half_ring = (
        _floats(layer[Layer.CODE_RECENT], 1 << 40, D),
        carray(at_uint16(layer[Layer.CODE_RECENT]), (1 << 40, D)),
    )
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
                _put(kind, last_BHGD[b, h, g], float_ring, half_ring, place + g)
    code_scan(
        h, h + 1, last_BHGD, key_YD, value_YD, half_key_YD, half_value_YD, kind, N, _blocks(step), step_BX,
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
def _parts(step, dense, length, threads):
    # of a request's heads: several of those that read everything, so that all threads have work
    return max(1, min(2 * threads, length // PART)) if dense and threads > 1 else 1


@inner
def _attend(step, layer, real, threads, sync, ticket, scratch):
    # heads of requests, in parts
    H, step_BX, turn = step[Step.HEADS], _requests(step), np.int64(0)
    item = _take(sync, ticket, threads, turn)
    place, first = np.int64(0), np.int64(0)  # of the request's items, and its tokens
    for b in range(len(step_BX)):
        W = step_BX[b, QUERIES]
        dense = layer[Layer.LEFT_DENSE] != 0 or step_BX[b, MODE] == SLOW
        parts = _parts(step, dense, step_BX[b, LENGTH], threads)
        while W and item < place + H * parts:
            h, part = (item - place) // parts, (item - place) % parts
            _attend_head(step, layer, real, b, h, first, part, parts, item, dense, scratch)
            turn += 1
            item = _take(sync, ticket, threads, turn)
        if W:
            place += H * parts
        first += W


@inner
def _read(step, layer, keys, cap, row_T, count, first, queries, evidence, column, scratch):
    # rows of pages or of the packed segment, by queries from `first` on; the last ones' logits are the evidence
    query_QD, room_QT, most_Q, total_Q, out_QD, _, a = scratch
    a[calls.KEYS], a[calls.VALUES] = layer[keys], layer[keys + 1]
    a[calls.NUMBERS], a[calls.COUNT], a[calls.QUERIES] = row_T.ctypes.data, count, queries
    a[calls.QUERY], a[calls.WIDTH], a[calls.CAP] = query_QD[first:].ctypes.data, step[Step.WIDTH], bits_of(cap)
    a[calls.ROOM], a[calls.MOST] = room_QT.ctypes.data, most_Q[first:].ctypes.data
    a[calls.TOTAL], a[calls.OUT] = total_Q[first:].ctypes.data, out_QD[first:].ctypes.data
    a[calls.LOGITS], a[calls.LOGITS_WIDTH] = evidence + 4 * column, step[Step.LONGEST]
    a[calls.WRITTEN] = step[Step.GROUP] if evidence != 0 else 0
    call(step[Step.READ], a.ctypes.data)


@inner
def _attend_head(step, layer, real, b, h, first, part, parts, item, dense, scratch):
    query_QD, room_QT, most_Q, total_Q, out_QD, row_T, arguments = scratch
    H, G, D, step_BX, cap = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], _requests(step), real[Real.CAP]
    W, length = step_BX[b, QUERIES], step_BX[b, LENGTH]
    made_XO = _floats(step[Step.MADE_XO], step[Step.TOKENS], (H * G + 2 * H) * D)
    for w in range(W):
        for g in range(G):
            at = (h * G + g) * D
            for d in range(D):
                query_QD[w * G + g, d] = made_XO[first + w, at + d] * real[Real.SCALE]
    Q = W * G
    most, total, out = most_Q[:Q], total_Q[:Q], out_QD[:Q]
    start_head(most, total, out)
    block_P, N = _blocks(step)[b], step[Step.PAGE]
    if dense:
        seen = length - W + 1  # by all queries
        begin, end = seen * part // parts, seen * (part + 1) // parts
        evidence = 0
        if layer[Layer.EVIDENCE] != 0 and layer[Layer.LEFT_DENSE] == 0:
            evidence = layer[Layer.EVIDENCE] + 4 * (step_BX[b, EVIDENCE] * H + h) * G * step[Step.LONGEST]
        for t in range(begin, end):
            row_T[t - begin] = _page_row(block_P, H, h, N, t)
        _read(step, layer, Layer.KEYS, cap, row_T, end - begin, 0, Q, evidence, begin, scratch)
        for w in range(1, W if part == parts - 1 else 0):  # what only later queries see
            row_T[0] = _page_row(block_P, H, h, N, seen - 1 + w)
            _read(step, layer, Layer.KEYS, cap, row_T, 1, w * G, Q - w * G, evidence, seen - 1 + w, scratch)
    else:
        start, count, S = step_BX[b, ALLOWED_STOP], np.int64(0), layer[Layer.ROWS]
        chosen = np.int64(carray(at_int32(layer[Layer.LENGTHS]), (step[Step.REQUESTS], H))[b, h])
        if step[Step.IN_PLACE]:
            position_S = carray(at_int32(layer[Layer.POSITIONS]), (step[Step.REQUESTS], H, S))[b, h]
            for i in range(chosen):
                row_T[i] = _page_row(block_P, H, h, N, position_S[i])
            count = chosen
        else:
            for i in range(chosen):
                row_T[i] = (b * H + h) * S + i
            _read(step, layer, Layer.PACKED_KEYS, cap, row_T, chosen, 0, Q, 0, 0, scratch)
        for t in range(start, length):
            row_T[count + t - start] = _page_row(block_P, H, h, N, t)
        _read(step, layer, Layer.KEYS, cap, row_T, count + length - start, 0, Q, 0, 0, scratch)
    if parts > 1:
        rows = item * step[Step.QUERIES] * G
        part_QD = _floats(step[Step.PART_IQD] + 4 * rows * D, Q, D)
        most_all, total_all = _vector(step[Step.MOST_IQ] + 4 * rows, Q), _vector(step[Step.SUM_IQ] + 4 * rows, Q)
        for q in range(Q):
            _copy(out[q], part_QD[q])
            most_all[q], total_all[q] = most[q], total[q]
        return
    chooses = step[Step.CHOOSES] != 0 and not dense
    logit = _vector(step[Step.LOGIT_BHG] + 4 * (b * H + h) * G, G if chooses else 0)
    mean = _vector(step[Step.MEAN_BHE] + 4 * (b * H + h) * D, D if chooses else 0)
    end_head(logit[:0], logit, mean, most, total, out)
    out_XO = _floats(step[Step.OUT_XO], step[Step.TOKENS], H * G * D)
    for q in range(Q):
        at = (h * G + q % G) * D
        _copy(out[q], out_XO[first + q // G, at : at + D])


@inner
def _join_parts(step, layer, threads, out_XO):
    # copy the attention's output, and join what was attended in parts
    H, G, D, step_BX = step[Step.HEADS], step[Step.GROUP], step[Step.WIDTH], _requests(step)
    shared_XO = _floats(step[Step.OUT_XO], step[Step.TOKENS], H * G * D)
    place, first = np.int64(0), np.int64(0)
    for b in range(len(step_BX)):
        W = step_BX[b, QUERIES]
        dense = layer[Layer.LEFT_DENSE] != 0 or step_BX[b, MODE] == SLOW
        parts = _parts(step, dense, step_BX[b, LENGTH], threads)
        for w in range(W):
            if parts == 1:
                _copy(shared_XO[first + w], out_XO[first + w])
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
        most = max(most, _vector(step[Step.MOST_IQ] + 4 * (row + part * stride), 1)[0])
    for part in range(parts):
        at = row + part * stride
        total += _vector(step[Step.SUM_IQ] + 4 * at, 1)[0] * exp(_vector(step[Step.MOST_IQ] + 4 * at, 1)[0] - most)
    for d in range(D):
        out_D[d] = 0
    for part in range(parts):
        at = row + part * stride
        weight = exp(_vector(step[Step.MOST_IQ] + 4 * at, 1)[0] - most) / total
        add_row(_vector(step[Step.PART_IQD] + 4 * at * D, D), weight, out_D)


@inner
def _gate(step, layer, threads, sync, ticket, rows, arguments):
    # both projections of the gated MLP, and the gate; rounded for a last matrix of blocks
    M, X = step[Step.INNER], step[Step.TOKENS]
    gate_XM, up_XM = _floats(step[Step.GATE_XM], X, M), _floats(step[Step.UP_XM], X, M)
    round_XM = carray(at_int16(step[Step.ROUND_XM]), (X, M))
    scale, total = _floats(step[Step.SCALE_XB], X, M // BLOCK), _floats(step[Step.TOTAL_XB], X, M // BLOCK)
    gate, up = _matrices(layer, GATE, GATE), _matrices(layer, UP, UP)
    rounds = layer[Layer.MATRICES + DOWN * SIZE + KIND] >= BLOCK
    piece, turn = _piece(M, threads), np.int64(0)
    while True:
        begin = piece * _take(sync, ticket, threads, turn)
        turn += 1
        if begin >= M:
            break
        end = min(begin + piece, M)
        _multiply(step, gate, begin, end, rows, gate_XM, 0, arguments)
        _multiply(step, up, begin, end, rows, up_XM, 0, arguments)
        for x in range(X):
            if step[Step.GELU]:
                _gelu(gate_XM[x, begin:end], up_XM[x, begin:end])
            else:
                _silu(gate_XM[x, begin:end], up_XM[x, begin:end])
            if rounds:
                low, high = begin // BLOCK, end // BLOCK
                round_row(gate_XM[x, begin:end], round_XM[x, begin:end], scale[x, low:high], total[x, low:high])


@inner
def _scratch(step):
    # of attention, for one thread
    Q, D = step[Step.QUERIES] * step[Step.GROUP], step[Step.WIDTH]
    query_QD, room_QT, out_QD = np.empty((Q, D), F), np.empty((Q, TILE), F), np.empty((Q, D), F)
    row_T = np.empty(step[Step.LONGEST] + TILE, np.int64)
    return query_QD, room_QT, np.empty(Q, F), np.empty(Q, F), out_QD, row_T, np.empty(calls.SIZES, np.int64)


@entry
def run_stages(share, threads, first, last, step, layer_LX, real):
    """Run stages `first` to `last` - 1, six a layer and the output matrix, as one of some threads."""
    L, X, I, M = step[Step.LAYERS], step[Step.TOKENS], step[Step.HIDDEN], step[Step.INNER]
    H, D, outputs = step[Step.HEADS], step[Step.WIDTH], step[Step.HEADS] * step[Step.GROUP] * step[Step.WIDTH]
    sync = carray(at_int64(step[Step.SYNC]), (TICKETS + last - first,))
    shared_XI, back_XI = _floats(step[Step.HIDDEN_XI], X, I), _floats(step[Step.BACK_XI], X, I)
    made_XO = _floats(step[Step.MADE_XO], X, outputs + 2 * H * D)
    x_XI, normed_XI, out_XO, row = np.empty((X, I), F), np.empty((X, I), F), np.empty((X, outputs), F), np.empty(I, F)
    _copy(shared_XI.reshape(X * I), x_XI.reshape(X * I))
    widest = max(I, outputs)
    room = np.empty(X * widest, np.int16), np.empty(X * widest // BLOCK, F), np.empty(X * widest // BLOCK, F)
    scratch, met = _scratch(step), np.int64(0)
    arguments = scratch[6]
    rows = normed_XI, *_rounded(room, X, I)
    out_rows = out_XO, *_rounded(room, X, outputs)
    down_rows = (
        _floats(step[Step.GATE_XM], X, M), carray(at_int16(step[Step.ROUND_XM]), (X, M)),
        _floats(step[Step.SCALE_XB], X, M // BLOCK), _floats(step[Step.TOTAL_XB], X, M // BLOCK),
    )  # fmt: skip
    for number in range(first, last):
        layer, stage, ticket = layer_LX[min(number // STAGES, L - 1)], number % STAGES, TICKETS + number - first
        if stage == 0:
            if number > 0:
                after = layer_LX[number // STAGES - 1][Layer.MLP_AFTER]
                _add_back(x_XI, back_XI, after, real[Real.EPS], row)
            norm = layer[Layer.NORM] if number < L * STAGES else step[Step.LAST_NORM]
            _norm_rows(x_XI, norm, real[Real.EPS], rows)
            if number < L * STAGES:
                _project(
                    step,
                    _matrices(layer, QUERY, VALUE),
                    outputs + 2 * H * D,
                    threads,
                    sync,
                    ticket,
                    rows,
                    made_XO,
                    arguments,
                )
            else:
                head = step[Step.HEAD : Step.HEAD + SIZE]
                logits_XV = _floats(step[Step.LOGITS_XV], X, head[OUT])
                _project(step, head, head[OUT], threads, sync, ticket, rows, logits_XV, arguments)
        elif stage == 1:
            turn = np.int64(0)
            h = _take(sync, ticket, threads, turn)
            while h < H:
                _store(step, layer, real, h)
                if step[Step.CHOOSES] and layer[Layer.LEFT_DENSE] == 0:
                    arguments[0], arguments[1] = step.ctypes.data, layer.ctypes.data
                    arguments[2], arguments[3] = real.ctypes.data, h
                    call(step[Step.CHOOSE], arguments.ctypes.data)
                turn += 1
                h = _take(sync, ticket, threads, turn)
        elif stage == 2:
            _attend(step, layer, real, threads, sync, ticket, scratch)
        elif stage == 3:
            _join_parts(step, layer, threads, out_XO)
            _round(out_XO, out_rows[1], out_rows[2], out_rows[3])
            _project(step, _matrices(layer, OUTPUT, OUTPUT), I, threads, sync, ticket, out_rows, back_XI, arguments)
        elif stage == 4:
            _add_back(x_XI, back_XI, layer[Layer.AFTER], real[Real.EPS], row)
            _norm_rows(x_XI, layer[Layer.MLP_NORM], real[Real.EPS], rows)
            _gate(step, layer, threads, sync, ticket, rows, arguments)
        else:
            _project(step, _matrices(layer, DOWN, DOWN), I, threads, sync, ticket, down_rows, back_XI, arguments)
        met = _meet(sync, threads, met)
    if share == 0:
        _copy(x_XI.reshape(X * I), shared_XI.reshape(X * I))


@inner
def _rounded(room, X, width):
    # arrays for rounded rows, in memory that several widths share
    q, scale, total = room
    blocks = width // BLOCK
    return (
        q[: X * width].reshape(X, width), scale[: X * blocks].reshape(X, blocks), total[: X * blocks].reshape(X, blocks)
    )  # fmt: skip


@inner
def _norm_rows(x_XI, norm, eps, rows):
    normed_XI, q_XI, scale_XB, total_XB = rows
    for x in range(len(x_XI)):
        _norm(x_XI[x], _vector(norm, x_XI.shape[1]), eps, normed_XI[x])
    _round(normed_XI, q_XI, scale_XB, total_XB)
