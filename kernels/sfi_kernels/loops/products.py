"""Rows times weight matrices, of float32 to 16 bits, or of a GGUF file's blocks as 8-bit numbers with their scales.

A block is 32 numbers with a float32 scale, or one for each 16, and where the format has one a float32 minimum. Numbers
of 8 bits lie in the order of the matrix. Of 4 and 5 bits, a word of 16 bits holds one of each of four or three
blocks; a line has two words each of eight rows of the matrix, so that sums of eight results need no adding up, and the
scales of eight rows lie together. The rows that a matrix multiplies are rounded to 16 bits with a scale for 32
numbers: as quick as 8 bits, because a product of an 8-bit and a 16-bit number is one instruction either way, and the
results are float32's.

A matrix is handed over as a row of addresses and sizes, so that one compiled loop serves all matrices of a model; the
caller keeps its tensors.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from sfi_kernels.compiled import entry
from sfi_kernels.loops.llvm import F32, I8, I16, I32, I64, Code, vector
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT32, F, bits_of, inner, real
from sfi_kernels.matrix import BIAS, BLOCK, FIELDS, FINE, FIVE, FOUR, IN, KIND, MINIMA, NUMBERS, OUT, SCALES, TILE

AHEAD = 2048  # bytes of a matrix that are fetched before their turn
LEVELS = F(32767)

exact = njit(error_model="numpy", nogil=True)  # a product and a sum are rounded each, as numpy does it


def _address(kind: Any) -> Any:
    @intrinsic
    def at(context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(types.CPointer(kind)))

        return types.CPointer(kind)(types.int64), generate

    return at


at_int8, at_int32, at_uint16 = _address(types.int8), _address(types.int32), _address(types.uint16)
at_float32, at_int16, at_int64 = _address(types.float32), _address(types.int16), _address(types.int64)


def _pairs(code: Code, weight: Any, row: Any) -> Any:
    # sums of two products each of 16 numbers and 16 of a row, int32; x86 has one instruction for it
    b, wide = code.builder, vector(I32, 16)
    product = b.mul(b.sext(weight, wide), b.sext(row, wide))
    return b.add(*(code.pick(product, list(range(odd, 16, 2))) for odd in (0, 1)))


def _block_dot(per_block: int) -> Any:
    @intrinsic
    def block_dot(
        context: Any, numbers: Any, scales: Any, rows: Any, row_scales: Any, row: Any, output: Any, width: Any
    ) -> Any:
        """Return the product of a matrix' row `output` and a rounded row, `per_block` scales for 32 numbers."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            number_p, scale_p, row_p, row_scale_p = (
                code.pointer(place, kind) for place, kind in enumerate((I8, F32, I16, F32))
            )
            row, output, width = given[3][4:]
            blocks = b.udiv(width, code.count(BLOCK))
            row_p, row_scale_p = b.gep(row_p, [b.mul(row, width)]), b.gep(row_scale_p, [b.mul(row, blocks)])
            first, first_scale = b.mul(output, width), b.mul(output, b.mul(blocks, code.count(per_block)))
            sums = code.sums(per_block, 8)
            with code.loop(blocks) as loop:
                at = b.mul(loop.index, code.count(BLOCK))
                code.fetch(number_p, b.add(first, at), AHEAD)
                pairs = []
                for half in (0, 16):
                    here = b.add(at, code.count(half))
                    weight = code.load(number_p, b.add(first, here), vector(I8, 16), 1)
                    pairs.append(_pairs(code, weight, code.load(row_p, here, vector(I16, 16), 2)))
                row_scale = code.load(row_scale_p, loop.index, F32, 4)
                for place, pair in enumerate(pairs if per_block > 1 else [b.add(*pairs)]):
                    number = b.add(b.mul(loop.index, code.count(per_block)), code.count(place))
                    scale = b.fmul(code.load(scale_p, b.add(first_scale, number), F32, 4), row_scale)
                    code.add(sums[place], (b.sitofp(pair, vector(F32, 8)), code.spread(scale, 8)))
            whole = b.load(sums[0])
            for more in sums[1:]:
                whole = b.fadd(whole, b.load(more))
            return code.total(whole)

        arguments = (numbers, scales, rows, row_scales, types.int64, types.int64, types.int64)
        return types.float32(*arguments), generate

    return block_dot


def _tile_dot(fields: int) -> Any:
    bits = 16 // fields
    most = (1 << bits) - 1
    tall = vector(F32, TILE)

    @intrinsic
    def tile_dot(
        context: Any, words: Any, scales: Any, minima: Any, rows: Any, row_scales: Any, totals: Any, unit: Any,
        row: Any, tile: Any, width: Any, room: Any,
    ) -> Any:  # fmt: skip
        """Write the products of `TILE` rows of a matrix and a rounded row to `room`; minima are `minima` * `unit`."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            word_p, scale_p, minimum_p, row_p, row_scale_p, total_p = (
                code.pointer(place, kind) for place, kind in enumerate((I16, F32, F32, I16, F32, F32))
            )
            unit, row, tile, width = given[3][6:10]
            blocks = b.udiv(width, code.count(BLOCK))
            whole = b.udiv(blocks, code.count(fields))
            row_p, row_scale_p, total_p = (
                b.gep(pointer, [b.mul(row, size)])
                for pointer, size in ((row_p, width), (row_scale_p, blocks), (total_p, blocks))
            )
            groups = b.udiv(b.add(blocks, code.count(fields - 1)), code.count(fields))
            first, first_block = b.mul(tile, groups), b.mul(tile, blocks)
            (sums, lows), zero = code.sums(2, TILE), ir.Constant(vector(I32, TILE), [0] * TILE)

            def number(word: Any, field: int) -> Any:
                # sums of the second field stay below 2 ** 31 where it lies; others are shifted
                if field > 1:
                    word = b.lshr(word, ir.Constant(word.type, [bits * field] * 16))
                mask = most << bits if field == 1 else most
                return word if field == fields - 1 else b.and_(word, ir.Constant(word.type, [mask] * 16))

            def add(group: Any, chosen: range) -> None:
                pairs = {field: cgutils.alloca_once_value(b, zero) for field in chosen}
                for place in pairs.values():
                    b.store(zero, place)
                first_word = b.mul(b.add(first, group), code.count(BLOCK * TILE))
                first_number = b.mul(group, code.count(BLOCK * fields))
                with code.loop(code.count(BLOCK // 2)) as pair:
                    at = b.add(first_word, b.mul(pair.index, code.count(2 * TILE)))
                    code.fetch(word_p, at, AHEAD)
                    word = code.load(word_p, at, vector(I16, 2 * TILE), 2)
                    for field, place in pairs.items():
                        here = b.add(b.add(first_number, code.count(BLOCK * field)), b.mul(pair.index, code.count(2)))
                        two = code.spread(code.load(row_p, here, I32, 2), TILE)
                        product = _pairs(code, number(word, field), b.bitcast(two, vector(I16, 2 * TILE)))
                        b.store(b.add(b.load(place), product), place)
                for field, place in pairs.items():
                    block = b.add(b.mul(group, code.count(fields)), code.count(field))
                    here = b.mul(b.add(first_block, block), code.count(TILE))
                    factor = b.fmul(
                        code.load(row_scale_p, block, F32, 4), ir.Constant(F32, 0.5**bits if field == 1 else 1.0)
                    )
                    scale = b.fmul(code.load(scale_p, here, tall, 4), code.spread(factor, TILE))
                    code.add(sums, (b.sitofp(b.load(place), tall), scale))
                    total = code.spread(code.load(total_p, block, F32, 4), TILE)
                    code.add(lows, (code.load(minimum_p, here, tall, 4), total))

            with code.loop(whole) as loop:
                add(loop.index, range(fields))
            rest = b.sub(blocks, b.mul(whole, code.count(fields)))
            for count in range(1, fields):
                with b.if_then(b.icmp_signed("==", rest, code.count(count))):
                    add(whole, range(count))
            code.add(sums, (b.load(lows), code.spread(unit, TILE)))
            b.store(b.load(sums), b.bitcast(code.pointer(10, F32), tall.as_pointer()), align=4)
            return code.context.get_dummy_value()

        arguments = (words, scales, minima, rows, row_scales, totals, types.float32)
        return types.void(*arguments, types.int64, types.int64, types.int64, room), generate

    return tile_dot


def _float_dot(kind: int) -> Any:
    size = 4 if kind == FLOAT32 else 2

    @intrinsic
    def float_dot(context: Any, numbers: Any, rows: Any, row: Any, output: Any, width: Any) -> Any:
        """Return the product of a matrix' row `output` and a row, both of `width` numbers: a multiple of 32."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            number_p, row_p = code.pointer(0, F32 if kind == FLOAT32 else I16), code.pointer(1, F32)
            row, output, width = given[3][2:]
            row_p = b.gep(row_p, [b.mul(row, width)])
            (total,), first = code.sums(1, BLOCK), b.mul(output, width)
            with cgutils.for_range(b, b.udiv(width, ir.Constant(I64, BLOCK)), intp=I64) as loop:
                at = b.mul(loop.index, ir.Constant(I64, BLOCK))
                for line in range(0, BLOCK * size, 64):
                    code.fetch(number_p, b.add(first, at), AHEAD + line)
                code.add(total, (code.wide(number_p, b.add(first, at), kind, BLOCK), code.wide(row_p, at, 0, BLOCK)))
            return code.total(b.load(total))

        return types.float32(numbers, rows, types.int64, types.int64, types.int64), generate

    return float_dot


dot_of_32, dot_of_16 = _block_dot(1), _block_dot(2)
tile_of_4_bits, tile_of_5_bits = _tile_dot(FIELDS[FOUR]), _tile_dot(FIELDS[FIVE])
float_dot, bfloat16_dot, float16_dot = (_float_dot(kind) for kind in range(3))


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
def _multiply_blocks(matrix, begin, end, q_RI, scale_RB, out_RO):
    count, width, kind = matrix[OUT], matrix[IN], matrix[KIND]
    numbers = carray(at_int8(matrix[NUMBERS]), (count, width))
    scales = carray(at_float32(matrix[SCALES]), (count, width // BLOCK * (2 if kind == FINE else 1)))
    for o in range(begin, end):
        for r in range(len(q_RI)):
            if kind == BLOCK:
                out_RO[r, o] = dot_of_32(numbers, scales, q_RI, scale_RB, r, np.int64(o), width)
            else:
                out_RO[r, o] = dot_of_16(numbers, scales, q_RI, scale_RB, r, np.int64(o), width)


@inner
def _multiply_tiles(matrix, begin, end, q_RI, scale_RB, total_RB, out_RO):
    width, kind = matrix[IN], matrix[KIND]
    words = carray(at_uint16(matrix[NUMBERS]), (1,))
    scales = carray(at_float32(matrix[SCALES]), (1,))
    minima, unit = scales, F(-8 if kind == FOUR else -16)  # numbers around zero are stored from 0 on
    if matrix[MINIMA] != 0:
        minima, unit = carray(at_float32(matrix[MINIMA]), (1,)), F(1)
    room = np.empty(TILE, F)
    for tile in range(begin // TILE, (end + TILE - 1) // TILE):
        first, last = max(begin, tile * TILE), min(end, tile * TILE + TILE)
        for r in range(len(q_RI)):
            if kind == FOUR:
                tile_of_4_bits(words, scales, minima, q_RI, scale_RB, total_RB, unit, r, np.int64(tile), width, room)
            else:
                tile_of_5_bits(words, scales, minima, q_RI, scale_RB, total_RB, unit, r, np.int64(tile), width, room)
            for o in range(first, last):
                out_RO[r, o] = room[o - tile * TILE]


@inner
def _multiply_floats(matrix, begin, end, x_RI, out_RO):
    count, width, kind = matrix[OUT], matrix[IN], matrix[KIND]
    floats = carray(at_float32(matrix[NUMBERS]), (count, width))
    halves = carray(at_uint16(matrix[NUMBERS]), (count, width))
    for o in range(begin, end):
        for r in range(len(x_RI)):
            if kind == FLOAT32:
                out_RO[r, o] = float_dot(floats, x_RI, r, np.int64(o), width)
            elif kind == BFLOAT16:
                out_RO[r, o] = bfloat16_dot(halves, x_RI, r, np.int64(o), width)
            else:
                out_RO[r, o] = float16_dot(halves, x_RI, r, np.int64(o), width)


@inner
def multiply(matrix, begin, end, x_RI, q_RI, scale_RB, total_RB, out_RO):
    # outputs `begin` to `end` - 1 of some rows; those of 16 bits count for a matrix of blocks, else the floats
    if matrix[KIND] >= FOUR:
        _multiply_tiles(matrix, begin, end, q_RI, scale_RB, total_RB, out_RO)
    elif matrix[KIND] >= BLOCK:
        _multiply_blocks(matrix, begin, end, q_RI, scale_RB, out_RO)
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


@exact
def _widen_block(number, scale, to):
    for i in range(len(number)):
        to[i] = F(number[i]) * scale


@exact
def _widen_field(word, bits, shift, middle, scale, minimum, to):
    # `word` has two numbers of each row of a tile in turn, from those of this row on
    for i in range(len(to)):
        number = np.int32(word[i // 2 * 2 * TILE + i % 2] >> shift) & ((np.int32(1) << bits) - np.int32(1))
        to[i] = F(number - middle) * scale + minimum


@inner
def _widen_tiled(matrix, o, to):
    width, kind = matrix[IN], matrix[KIND]
    blocks, fields = width // BLOCK, 4 if kind == FOUR else 3
    tile, lane, groups = o // TILE, o % TILE, (blocks + fields - 1) // fields
    words = carray(at_uint16(matrix[NUMBERS]), ((tile + 1) * groups * BLOCK * TILE,))
    scales = carray(at_float32(matrix[SCALES]), (tile + 1, blocks, TILE))
    minima = carray(at_float32(matrix[MINIMA]), (tile + 1, blocks, TILE))
    middle, bits = np.int32(0 if matrix[MINIMA] != 0 else 8 if kind == FOUR else 16), np.int32(16 // fields)
    for block in range(blocks):
        first = (tile * groups + block // fields) * BLOCK * TILE + 2 * lane
        minimum = minima[tile, block, lane] if matrix[MINIMA] != 0 else F(-0.0)  # adding it changes no bit
        shift = np.uint16(bits * (block % fields))
        part = to[block * BLOCK : block * BLOCK + BLOCK]
        _widen_field(words[first:], bits, shift, middle, scales[tile, block, lane], minimum, part)


@entry
def widen_rows(begin, end, row_N, matrix, out_NI):
    """Write rows of a matrix of blocks, of which some `row_N` has the numbers, as float32; bit by bit as gguf does."""
    count, width = matrix[OUT], matrix[IN]
    group = 16 if matrix[KIND] == FINE else BLOCK
    numbers = carray(at_int8(matrix[NUMBERS]), (count, width))
    scales = carray(at_float32(matrix[SCALES]), (count, width // group))
    for n in range(begin, end):
        o = row_N[n]
        if matrix[KIND] >= FOUR:
            _widen_tiled(matrix, o, out_NI[n])
            continue
        for g in range(width // group):
            part = slice(g * group, g * group + group)
            _widen_block(numbers[o, part], scales[o, g], out_NI[n, part])
