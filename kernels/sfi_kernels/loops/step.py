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

import numpy as np
from numba import carray

from sfi_kernels import tables
from sfi_kernels.compiled import entry
from sfi_kernels.loops import views
from sfi_kernels.loops.products import at_int16, at_int64, round_row
from sfi_kernels.loops.step_heads import attend, join_parts, make_scratch, store
from sfi_kernels.loops.vectors import F, add_row, exp, inner
from sfi_kernels.loops.views import copy, floats, meet, rms_norm, take, vector
from sfi_kernels.tables import BLOCK, KIND, OUT, SIZE, STAGES, TICKETS, Layer, Real, Stage, Step

PIECES = 8  # of a product, for each thread


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


@inner
def _piece(outputs, threads):
    # outputs of a piece of a product: whole blocks, so that what follows can round them
    return BLOCK * max(1, min(4, outputs // (threads * PIECES * BLOCK)))


@inner
def _multiply(step, matrix, begin, end, rows, out_RO, offset, arguments):
    # write outputs of a matrix from `offset` of the results on
    x_XI, q_XI, scale_XB, total_XB = rows
    a = arguments
    a[views.MATRIX], a[views.BEGIN], a[views.END], a[views.ROWS] = matrix.ctypes.data, begin, end, len(x_XI)
    a[views.FLOATS], a[views.ROUNDED] = x_XI.ctypes.data, q_XI.ctypes.data
    a[views.SCALES], a[views.TOTALS] = scale_XB.ctypes.data, total_XB.ctypes.data
    a[views.RESULT], a[views.RESULT_WIDTH] = out_RO.ctypes.data + 4 * offset, out_RO.shape[1]
    views.call(step[Step.PRODUCT], a.ctypes.data)


@inner
def _project(step, matrices, outputs, work, rows, out_XO):
    # matrices whose outputs follow each other
    threads, sync, ticket, arguments = work
    piece, turn = _piece(outputs, threads), np.int64(0)
    while True:
        begin = piece * take(sync, ticket, threads, turn)
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
def _round(x_XI, q_XI, scale_XB, total_XB):
    for x in range(len(x_XI)):
        round_row(x_XI[x], q_XI[x], scale_XB[x], total_XB[x])


@inner
def _add_back(x_XI, back_XI, norm, eps, row):
    # add a stage's results, normed where the layer norms them
    for x in range(len(x_XI)):
        if norm != 0:
            rms_norm(back_XI[x], vector(norm, len(row)), eps, row)
            add_row(row, F(1), x_XI[x])
        else:
            add_row(back_XI[x], F(1), x_XI[x])


@inner
def _store_heads(step, layer, real, work):
    threads, sync, ticket, arguments = work
    turn = np.int64(0)
    h = take(sync, ticket, threads, turn)
    while h < step[Step.HEADS]:
        store(step, layer, real, h)
        if step[Step.CHOOSES] and layer[Layer.LEFT_DENSE] == 0:
            arguments[0], arguments[1] = step.ctypes.data, layer.ctypes.data
            arguments[2], arguments[3] = real.ctypes.data, h
            views.call(step[Step.CHOOSE], arguments.ctypes.data)
        turn += 1
        h = take(sync, ticket, threads, turn)


@inner
def _gate(step, layer, work, rows, down_rows):
    # both projections of the gated MLP, and the gate; rounded for a last matrix of blocks
    threads, sync, ticket, arguments = work
    gate_XM, round_XM, scale, total = down_rows
    X, M = gate_XM.shape
    up_XM = floats(step[Step.UP_XM], X, M)
    gate, up = _matrices(layer, tables.GATE, tables.GATE), _matrices(layer, tables.UP, tables.UP)
    rounds = layer[Layer.MATRICES + tables.DOWN * SIZE + KIND] >= BLOCK
    piece, turn = _piece(M, threads), np.int64(0)
    while True:
        begin = piece * take(sync, ticket, threads, turn)
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


@entry
def run_stages(share, threads, first, last, step, layer_LX, real):
    """Run stages `first` to `last` - 1, six a layer and the output matrix, as one of some threads."""
    L, X, width, M = step[Step.LAYERS], step[Step.TOKENS], step[Step.HIDDEN], step[Step.INNER]
    H, D, outputs = step[Step.HEADS], step[Step.WIDTH], step[Step.HEADS] * step[Step.GROUP] * step[Step.WIDTH]
    sync = carray(at_int64(step[Step.SYNC]), (TICKETS + last - first,))
    shared_XI, back_XI = floats(step[Step.HIDDEN_XI], X, width), floats(step[Step.BACK_XI], X, width)
    made_XO = floats(step[Step.MADE_XO], X, outputs + 2 * H * D)
    x_XI, normed_XI = np.empty((X, width), F), np.empty((X, width), F)
    out_XO, row = np.empty((X, outputs), F), np.empty(width, F)
    copy(shared_XI.reshape(X * width), x_XI.reshape(X * width))
    widest = max(width, outputs)
    room = np.empty(X * widest, np.int16), np.empty(X * widest // BLOCK, F), np.empty(X * widest // BLOCK, F)
    scratch, met = make_scratch(step), np.int64(0)
    arguments = scratch[6]
    rows = normed_XI, *_rounded(room, X, width)
    out_rows = out_XO, *_rounded(room, X, outputs)
    down_rows = (
        floats(step[Step.GATE_XM], X, M), carray(at_int16(step[Step.ROUND_XM]), (X, M)),
        floats(step[Step.SCALE_XB], X, M // BLOCK), floats(step[Step.TOTAL_XB], X, M // BLOCK),
    )  # fmt: skip
    for number in range(first, last):
        layer, stage = layer_LX[min(number // STAGES, L - 1)], number % STAGES
        work = threads, sync, TICKETS + number - first, arguments
        if stage == Stage.PROJECT:
            if number > 0:
                after = layer_LX[number // STAGES - 1][Layer.MLP_AFTER]
                _add_back(x_XI, back_XI, after, real[Real.EPS], row)
            norm = layer[Layer.NORM] if number < L * STAGES else step[Step.LAST_NORM]
            _norm_rows(x_XI, norm, real[Real.EPS], rows)
            if number < L * STAGES:
                _project(step, _matrices(layer, tables.QUERY, tables.VALUE), outputs + 2 * H * D, work, rows, made_XO)
            else:
                head = step[Step.HEAD : Step.HEAD + SIZE]
                logits_XV = floats(step[Step.LOGITS_XV], X, head[OUT])
                _project(step, head, head[OUT], work, rows, logits_XV)
        elif stage == Stage.STORE:
            _store_heads(step, layer, real, work)
        elif stage == Stage.ATTEND:
            attend(step, layer, real, work, scratch)
        elif stage == Stage.OUTPUT:
            join_parts(step, layer, threads, out_XO)
            _round(out_XO, out_rows[1], out_rows[2], out_rows[3])
            _project(step, _matrices(layer, tables.OUTPUT, tables.OUTPUT), width, work, out_rows, back_XI)
        elif stage == Stage.GATE:
            _add_back(x_XI, back_XI, layer[Layer.AFTER], real[Real.EPS], row)
            _norm_rows(x_XI, layer[Layer.MLP_NORM], real[Real.EPS], rows)
            _gate(step, layer, work, rows, down_rows)
        else:
            _project(step, _matrices(layer, tables.DOWN, tables.DOWN), width, work, down_rows, back_XI)
        met = meet(sync, threads, met)
    if share == 0:
        copy(x_XI.reshape(X * width), shared_XI.reshape(X * width))


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
        rms_norm(x_XI[x], vector(norm, x_XI.shape[1]), eps, normed_XI[x])
    _round(normed_XI, q_XI, scale_XB, total_XB)
