"""Rows times weight matrices, of float32 to 16 bits, or of a GGUF file's blocks as numbers of few bits and scales.

The rows that a matrix of blocks (`tiles`) multiplies are rounded to 16 bits with a scale for 32 numbers: as quick as 8
bits, and the results are float32's. A file's numbers become int8 first, in the order of their weights, without zero
points. The layouts are ggml's: `gguf.quants` unpacks the same blocks in numpy, and is the reference. A matrix is handed
over as a row of addresses and sizes (`sfi_kernels.tables`).
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from sfi_kernels.compiled import entry
from sfi_kernels.loops.tiles import AHEAD, multiply_tile, widen_tile
from sfi_kernels.loops.vectors import F32, FLOAT32, I16, Code, F, bits_of, inner, real
from sfi_kernels.tables import BIAS, BLOCK, IN, KIND, NUMBERS, OUT, TILE

LEVELS = F(32767)
GROUPS = 8  # of 32 numbers in a block of 256


def _address(kind: Any) -> Any:
    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), generate

    return at


at_int32, at_uint16 = _address(types.int32), _address(types.uint16)
at_float32, at_int16, at_int64 = _address(types.float32), _address(types.int16), _address(types.int64)


@intrinsic
def float_dot(context: Any, kind: Any, floats: Any, halves: Any, rows: Any, row: Any, output: Any, width: Any) -> Any:
    """Return the product of a matrix' row `output` and a row, both of `width` numbers: a multiple of 32."""

    def generate(*given: Any) -> Any:
        code, b, (kind, *_, row, output, width) = Code(*given), given[1], given[3]
        result, first = code.place(ir.Constant(F32, 0.0)), b.mul(output, width)
        row_p = b.gep(code.pointer(3, F32), [b.mul(row, width)])
        for known in range(3):
            size, number_p = (4, code.pointer(1, F32)) if known == FLOAT32 else (2, code.pointer(2, I16))
            with b.if_then(b.icmp_signed("==", kind, code.count(known))):
                (total,) = code.sums(1, BLOCK)
                with code.loop(b.udiv(width, code.count(BLOCK))) as loop:
                    at = b.mul(loop.index, code.count(BLOCK))
                    for line in range(0, BLOCK * size, 64):
                        code.fetch(number_p, b.add(first, at), AHEAD + line)
                    product = code.wide(number_p, b.add(first, at), known, BLOCK), code.wide(row_p, at, 0, BLOCK)
                    code.add(total, product)
                b.store(code.total(b.load(total)), result)
        return b.load(result)

    return types.float32(types.int64, floats, halves, rows, types.int64, types.int64, types.int64), generate


@inner
def _size(x):
    # the largest number, without its sign
    most = np.int32(0)
    for i in range(len(x)):
        most = max(most, np.int32(bits_of(x[i]) & np.int32(0x7FFFFFFF)))
    return real(most)


@inner
def _round_block(x, factor, q):
    total = np.int32(0)
    for i in range(len(x)):
        level = np.int16(np.int32(np.floor(x[i] * factor + F(0.5))))
        q[i] = level
        total += np.int32(level)
    return total


@inner
def round_row(x, q, scale, total):
    # to 16 bits, with a scale for 32 numbers; `total` receives the sums of 32
    for block in range(len(scale)):
        part = x[BLOCK * block : BLOCK * block + BLOCK]
        most = _size(part)
        scale[block] = most / LEVELS
        count = _round_block(part, LEVELS / most if most > F(0) else F(0), q[BLOCK * block : BLOCK * block + BLOCK])
        total[block] = F(count) * scale[block]


@inner
def _multiply_blocks(matrix, begin, end, q_RI, scale_RB, total_RB, out_RO):
    width, address = matrix[IN], np.int64(matrix.ctypes.data)
    room = np.empty(TILE, F)
    to = np.int64(room.ctypes.data)
    for tile in range(begin // TILE, (end + TILE - 1) // TILE):
        for r in range(len(q_RI)):
            row = np.int64(q_RI.ctypes.data + 2 * r * width)
            scale = np.int64(scale_RB.ctypes.data + 4 * r * scale_RB.shape[1])
            total = np.int64(total_RB.ctypes.data + 4 * r * total_RB.shape[1])
            multiply_tile(matrix[KIND], address, tile, width, row, scale, total, to)
            for o in range(max(begin, tile * TILE), min(end, tile * TILE + TILE)):
                out_RO[r, o] = room[o - tile * TILE]


@inner
def _multiply_floats(matrix, begin, end, x_RI, out_RO):
    count, width, kind = matrix[OUT], matrix[IN], matrix[KIND]
    floats = carray(at_float32(matrix[NUMBERS]), (count, width))
    halves = carray(at_uint16(matrix[NUMBERS]), (count, width))
    for o in range(begin, end):
        for r in range(len(x_RI)):
            out_RO[r, o] = float_dot(kind, floats, halves, x_RI, r, np.int64(o), width)


@inner
def multiply(matrix, begin, end, x_RI, q_RI, scale_RB, total_RB, out_RO):
    # outputs `begin` to `end` - 1 of some rows; those of 16 bits count for a matrix of blocks, else the floats
    if matrix[KIND] >= BLOCK:
        _multiply_blocks(matrix, begin, end, q_RI, scale_RB, total_RB, out_RO)
    else:
        _multiply_floats(matrix, begin, end, x_RI, out_RO)
    if matrix[BIAS] != 0:
        bias = carray(at_float32(matrix[BIAS]), (matrix[OUT],))
        for r in range(len(out_RO)):
            for o in range(begin, end):
                out_RO[r, o] += bias[o]


@entry
def linear(begin, end, matrix, x_RI, out_RO):
    """Multiply some outputs of a matrix by rows, float32."""
    R, width = x_RI.shape
    rounds = matrix[KIND] >= BLOCK
    q_RI = np.empty((R, width if rounds else 0), np.int16)
    scale_RB, total_RB = np.empty((R, len(q_RI[0]) // BLOCK), F), np.empty((R, len(q_RI[0]) // BLOCK), F)
    if rounds:
        for r in range(R):
            round_row(x_RI[r], q_RI[r], scale_RB[r], total_RB[r])
    multiply(matrix, begin, end, x_RI, q_RI, scale_RB, total_RB, out_RO)


@entry
def widen_rows(begin, end, row_N, matrix, out_NI):
    """Write rows of a matrix of blocks, of which some `row_N` has the numbers, as float32; bit by bit as gguf does."""
    room_8I = np.empty((TILE, matrix[IN]), F)
    n = begin
    while n < end:
        tile, last = row_N[n] // TILE, n + TILE - 1
        whole = row_N[n] % TILE == 0 and last < end
        for more in range(1, TILE if whole else 0):
            whole = whole and row_N[n + more] == row_N[n] + more
        widen_tile(matrix, tile, np.int64(out_NI[n:].ctypes.data if whole else room_8I.ctypes.data))
        if not whole:
            out_NI[n] = room_8I[row_N[n] % TILE]
        n += TILE if whole else 1


@inner
def _halves(source, fifth, zero, to):
    # 16 bytes: low halves, then high ones; `fifth` has the fifth bit of each number
    for i in range(16):
        low = np.int32(source[i]) & np.int32(15) | (fifth >> np.uint32(i) & np.uint32(1)) << np.uint32(4)
        to[i] = np.int8(low - zero)
    for i in range(16):
        high = np.int32(source[i]) >> np.int32(4) | (fifth >> np.uint32(i + 16) & np.uint32(1)) << np.uint32(4)
        to[16 + i] = np.int8(high - zero)


@inner
def _group(source, shift, more, more_shift, mask, zero, to):
    # the halves of 32 bytes, with more bits of 32 others in front
    for i in range(BLOCK):
        low = source[i] >> shift & np.uint8(15)
        high = (more[i] >> more_shift & mask) << np.uint8(4)
        to[i] = np.int8(low | high) - zero


@inner
def _large(block, low, width, high, per_byte, mask, zero, to):
    # `low` is the first byte of halves, in parts of `width` bytes; `high` that of more bits, of `per_byte` numbers each
    for g in range(GROUPS):
        lines = width // BLOCK
        part, line, upper = g // (2 * lines), g % lines, g // lines % 2
        begin = low + width * part + BLOCK * line
        more = high + BLOCK * (g // per_byte)
        shift = np.uint8(GROUPS // per_byte * (g % per_byte))
        _group(
            block[begin : begin + BLOCK], np.uint8(4 * upper), block[more : more + BLOCK], shift, np.uint8(mask),
            np.int8(zero), to[BLOCK * g : BLOCK * g + BLOCK],
        )  # fmt: skip


@inner
def _word(block, at):
    word = np.uint32(0)
    for i in range(4):
        word |= np.uint32(block[at + i]) << np.uint32(8 * i)
    return word


@inner
def _unpack_row(kind, block_BX, number_I):
    for b in range(len(block_BX)):
        block = block_BX[b]
        if kind >= 12:  # noqa: PLR2004 - the K kinds
            to = number_I[256 * b : 256 * b + 256]
            if kind == 12:  # noqa: PLR2004 - Q4_K
                _large(block, 16, 32, 16, 8, 0, 0, to)
            elif kind == 13:  # noqa: PLR2004 - Q5_K
                _large(block, 48, 32, 16, 8, 1, 0, to)
            else:  # Q6_K
                _large(block, 0, 64, 128, 4, 3, 32, to)
            continue
        to = number_I[BLOCK * b : BLOCK * b + BLOCK]
        if kind == 8:  # noqa: PLR2004 - Q8_0
            for i in range(BLOCK):
                to[i] = np.int8(block[2 + i])
        elif kind == 2:  # noqa: PLR2004 - Q4_0
            _halves(block[2:], np.uint32(0), 8, to)
        elif kind == 3:  # noqa: PLR2004 - Q4_1
            _halves(block[4:], np.uint32(0), 0, to)
        elif kind == 6:  # noqa: PLR2004 - Q5_0
            _halves(block[6:], _word(block, 2), 16, to)
        else:  # Q5_1
            _halves(block[8:], _word(block, 4), 0, to)


@inner
def _pack_pairs(number_8I, first, shift, middle, word_P16):
    # add a block of eight rows to lines, from number `first` on
    for pair in range(BLOCK // 2):
        for row in range(TILE):
            for odd in range(2):
                number = np.int16(np.int16(number_8I[row, first + 2 * pair + odd]) + middle)
                word_P16[pair, 2 * row + odd] |= number << shift


@entry
def pack_numbers(begin, end, kind, fields, block_OBX, word_TGP):
    """Add the numbers of tiles `begin` to `end` - 1 to lines [T, groups, 16, 2 * `TILE`], zeros of int8 or int16.

    `kind` is the type's number in a GGUF file; of several fields, numbers without a minimum count from the lowest on.
    """
    middle = np.int16(8 if kind == 2 else 16 if kind == 6 else 0)  # noqa: PLR2004 - Q4_0, Q5_0
    count, blocks = len(block_OBX), block_OBX.shape[1] * (GROUPS if kind >= 12 else 1)  # noqa: PLR2004 - the K kinds
    number_8I = np.zeros((TILE, blocks * BLOCK), np.int8)
    for tile in range(begin, end):
        for row in range(min(TILE, count - tile * TILE)):
            _unpack_row(kind, block_OBX[tile * TILE + row], number_8I[row])
        for b in range(blocks):
            shift = np.int16(16 // fields * (b % fields))
            _pack_pairs(number_8I, b * BLOCK, shift, middle, word_TGP[tile, b // fields])
