"""Rows times weight matrices, of float32 to 16 bits, or of a GGUF file's blocks as numbers of few bits and scales.

A block is 32 numbers with a float16 scale, and where the format has one a float16 minimum. Of the K kinds eight blocks
have them, times an int8 number of each block, or of 16 of its numbers. Eight rows of a matrix are a tile: a line has
two numbers each of its rows, so that a vector of sums is of eight results, and the scales of eight rows lie together.
Numbers of 8 bits are bytes; of 4 and 5 bits a word of 16 bits holds one of each of four or three blocks. The rows that
a matrix multiplies are rounded to 16 bits with a scale for 32 numbers: as quick as 8 bits, because a product of an
8-bit and a 16-bit number is one instruction either way, and the results are float32's.

A matrix is handed over as a row of addresses and sizes, so that one compiled loop serves all matrices of a model; the
caller keeps its tensors.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from sfi_kernels.compiled import entry
from sfi_kernels.loops.llvm import F32, I8, I16, I32, I64, Code, vector
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT16, FLOAT32, F, bits_of, inner, real
from sfi_kernels.matrix import (
    BIAS,
    BLOCK,
    FINE_MINIMA,
    FIVE,
    FIVE_K,
    FOUR,
    FOUR_K,
    IN,
    KIND,
    LAYOUTS,
    MIDDLES,
    NUMBERS,
    OUT,
    TILE,
)

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


LINE = vector(I16, 2 * TILE)
TALL = vector(F32, TILE)
PAIRS = BLOCK // 2  # lines of a block
GROUP = 8  # blocks of the K kinds that share a scale


class _Tile:
    """Code that reads a tile of a kind: where its blocks lie, and their numbers."""

    def __init__(self, code: Code, kind: int, matrix: Any, tile: Any, width: Any) -> None:
        self.code, (self.fields, self.parts, self.fine) = code, LAYOUTS[kind]
        b = code.builder
        matrix_p = b.inttoptr(matrix, I64.as_pointer())
        numbers, *factors = (code.load(matrix_p, code.count(place), I64, 8) for place in range(FINE_MINIMA + 1))
        self.scales, self.minima = factors[:2], factors[2:]
        self.bits, self.unit = 16 // self.fields, I8 if self.fields == 1 else I16
        self.number_p = b.inttoptr(numbers, self.unit.as_pointer())
        self.blocks = b.udiv(width, code.count(BLOCK))
        self.groups = b.udiv(b.add(self.blocks, code.count(self.fields - 1)), code.count(self.fields))
        self.first_group, self.first_block = b.mul(tile, self.groups), b.mul(tile, self.blocks)

    def line(self, group: Any, pair: Any) -> Any:
        """Load a line of words, int16, and fetch a later one."""
        code, b = self.code, self.code.builder
        line = b.add(b.mul(b.add(self.first_group, group), code.count(PAIRS)), pair)
        at = b.mul(line, code.count(2 * TILE))
        code.fetch(self.number_p, at, AHEAD)
        return b.sext(code.load(self.number_p, at, vector(self.unit, 2 * TILE), 1), LINE)

    def factor(self, addresses: list[Any], block: Any, part: int) -> Any:
        """Load the scales or minima of a block's eight rows."""
        code, b = self.code, self.code.builder
        place = b.add(b.mul(b.add(self.first_block, block), code.count(self.parts)), code.count(part))
        at = b.udiv(b.add(self.first_block, block), code.count(GROUP)) if self.fine else place
        coarse, fine = (
            b.inttoptr(address, kind.as_pointer()) for address, kind in zip(addresses, (I16, I8), strict=True)
        )
        factor = code.wide(coarse, b.mul(at, code.count(TILE)), FLOAT16, TILE)
        if not self.fine:
            return factor
        number = code.load(fine, b.mul(place, code.count(TILE)), vector(I8, TILE), 1)
        return b.fmul(factor, b.sitofp(b.sext(number, vector(I32, TILE)), TALL))


def _field(code: Code, word: Any, field: int, fields: int) -> Any:
    # numbers of a field; the second one's where they lie, as whose sums stay below 2 ** 31
    b, bits = code.builder, 16 // fields
    if fields == 1:
        return word
    if field > 1:
        word = b.lshr(word, ir.Constant(LINE, [bits * field] * 2 * TILE))
    mask = (1 << bits) - 1 << (bits if field == 1 else 0)
    return word if field == fields - 1 else b.and_(word, ir.Constant(LINE, [mask] * 2 * TILE))


def _pairs(code: Code, number: Any, row: Any) -> Any:
    # sums of two products each, int32; x86 has one instruction for it
    b, wide = code.builder, vector(I32, 2 * TILE)
    product = b.mul(b.sext(number, wide), b.sext(row, wide))
    return b.add(*(code.pick(product, list(range(odd, 2 * TILE, 2))) for odd in (0, 1)))


def _tile_product(kind: int) -> Any:
    fields, parts, _ = LAYOUTS[kind]
    zero = ir.Constant(vector(I32, TILE), [0] * TILE)

    @intrinsic
    def tile_product(
        context: Any, matrix: Any, tile: Any, width: Any, row: Any, row_scales: Any, totals: Any, out: Any
    ) -> Any:
        """Write the products of a tile's rows and a rounded row, by addresses."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            matrix, tile, width, row, row_scales, totals, out = given[3]
            rows = _Tile(code, kind, matrix, tile, width)
            some = b.icmp_signed("!=", rows.minima[0], code.count(0))
            lowest = [b.select(some, *pair) for pair in zip(rows.minima, rows.scales, strict=True)]
            unit = b.select(some, ir.Constant(F32, 1.0), ir.Constant(F32, -float(MIDDLES[kind])))
            row_scale_p, total_p = (b.inttoptr(address, F32.as_pointer()) for address in (row_scales, totals))
            row_p = b.inttoptr(row, I16.as_pointer())
            sums, lows = code.sums(2, TILE)

            def add(group: Any, count: int, part: int) -> None:
                products = [code.place(zero) for _ in range(count)]
                first = b.mul(group, code.count(fields))
                with code.loop(code.count(PAIRS // parts * (part + 1)), PAIRS // parts * part) as pair:
                    word = rows.line(group, pair.index)
                    for field, place in enumerate(products):
                        block = b.add(first, code.count(field))
                        here = b.add(b.mul(block, code.count(BLOCK)), b.mul(pair.index, code.count(2)))
                        two = b.bitcast(code.spread(code.load(row_p, here, I32, 2), TILE), LINE)
                        product = _pairs(code, _field(code, word, field, fields), two)
                        b.store(b.add(b.load(place), product), place)
                for field, place in enumerate(products):
                    block = b.add(first, code.count(field))
                    lies = ir.Constant(F32, 0.5 ** (16 // fields) if field == 1 else 1.0)
                    factor = code.spread(b.fmul(code.load(row_scale_p, block, F32, 4), lies), TILE)
                    scale = rows.factor(rows.scales, block, part)
                    code.add(sums, (b.sitofp(b.load(place), TALL), b.fmul(scale, factor)))
                    if fields > 1:
                        total = code.spread(code.load(total_p, block, F32, 4), TILE)
                        code.add(lows, (rows.factor(lowest, block, part), total))

            whole = b.udiv(rows.blocks, code.count(fields))
            with code.loop(whole) as loop:
                for part in range(parts):
                    add(loop.index, fields, part)
            rest = b.sub(rows.blocks, b.mul(whole, code.count(fields)))
            for count in range(1, fields):
                with b.if_then(b.icmp_signed("==", rest, code.count(count))):
                    add(whole, count, 0)
            code.add(sums, (b.load(lows), code.spread(unit, TILE)))
            b.store(b.load(sums), b.inttoptr(out, TALL.as_pointer()), align=4)
            return code.context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return tile_product


def _tile_widening(kind: int) -> Any:
    fields, parts, _ = LAYOUTS[kind]
    wide, floats = vector(I32, 2 * TILE), vector(F32, 2 * TILE)

    @intrinsic
    def widen_tile(context: Any, matrix: Any, tile: Any, width: Any, out: Any) -> Any:
        """Write a tile's rows as float32, [`TILE`, I], to an address."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            matrix, tile, width, out = given[3]
            rows, twice = _Tile(code, kind, matrix, tile, width), [n // 2 for n in range(2 * TILE)]
            out_p = b.inttoptr(out, F32.as_pointer())
            some = b.icmp_signed("!=", rows.minima[0], code.count(0))
            lowest = [b.select(some, *pair) for pair in zip(rows.minima, rows.scales, strict=True)]
            middle = b.select(some, ir.Constant(I32, 0), ir.Constant(I32, MIDDLES[kind]))
            nothing = ir.Constant(TALL, [-0.0] * TILE)  # adding it changes no bit

            def write(block: Any, part: int) -> None:
                group, field = b.udiv(block, code.count(fields)), b.urem(block, code.count(fields))
                scale = code.pick(rows.factor(rows.scales, block, part), twice)
                minimum = code.pick(b.select(some, rows.factor(lowest, block, part), nothing), twice)
                shift = code.spread(b.trunc(b.mul(field, code.count(16 // fields)), I16), 2 * TILE)
                with code.loop(code.count(PAIRS // parts * (part + 1)), PAIRS // parts * part) as pair:
                    number = rows.line(group, pair.index)
                    if fields > 1:
                        mask = ir.Constant(LINE, [(1 << 16 // fields) - 1] * 2 * TILE)
                        number = b.and_(b.lshr(number, shift), mask)
                    number = b.sub(b.sext(number, wide), code.spread(middle, 2 * TILE))
                    number = b.fadd(b.fmul(b.sitofp(number, floats), scale), minimum)
                    at = b.add(b.mul(block, code.count(BLOCK)), b.mul(pair.index, code.count(2)))
                    for row in range(TILE):
                        place = b.gep(out_p, [b.add(b.mul(width, code.count(row)), at)])
                        two = code.pick(number, [2 * row, 2 * row + 1])
                        b.store(two, b.bitcast(place, two.type.as_pointer()), align=4)

            with code.loop(rows.blocks) as loop:
                for part in range(parts):
                    write(loop.index, part)
            return code.context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return widen_tile


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
            with code.loop(b.udiv(width, code.count(BLOCK))) as loop:
                at = b.mul(loop.index, code.count(BLOCK))
                for line in range(0, BLOCK * size, 64):
                    code.fetch(number_p, b.add(first, at), AHEAD + line)
                code.add(total, (code.wide(number_p, b.add(first, at), kind, BLOCK), code.wide(row_p, at, 0, BLOCK)))
            return code.total(b.load(total))

        return types.float32(numbers, rows, types.int64, types.int64, types.int64), generate

    return float_dot


multiply_8, multiply_4, multiply_5, multiply_4_k, multiply_5_k, multiply_6_k = map(_tile_product, LAYOUTS)
widen_8, widen_4, widen_5, widen_4_k, widen_5_k, widen_6_k = map(_tile_widening, LAYOUTS)
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
def _multiply_tile(kind, matrix, tile, width, row, scale, total, to):
    if kind == BLOCK:
        multiply_8(matrix, tile, width, row, scale, total, to)
    elif kind == FOUR:
        multiply_4(matrix, tile, width, row, scale, total, to)
    elif kind == FIVE:
        multiply_5(matrix, tile, width, row, scale, total, to)
    elif kind == FOUR_K:
        multiply_4_k(matrix, tile, width, row, scale, total, to)
    elif kind == FIVE_K:
        multiply_5_k(matrix, tile, width, row, scale, total, to)
    else:
        multiply_6_k(matrix, tile, width, row, scale, total, to)


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
            _multiply_tile(matrix[KIND], address, tile, width, row, scale, total, to)
            for o in range(max(begin, tile * TILE), min(end, tile * TILE + TILE)):
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


@exact
def _widen_tile(matrix, tile, to):
    width, kind, address = matrix[IN], matrix[KIND], np.int64(matrix.ctypes.data)
    if kind == BLOCK:
        widen_8(address, tile, width, to)
    elif kind == FOUR:
        widen_4(address, tile, width, to)
    elif kind == FIVE:
        widen_5(address, tile, width, to)
    elif kind == FOUR_K:
        widen_4_k(address, tile, width, to)
    elif kind == FIVE_K:
        widen_5_k(address, tile, width, to)
    else:
        widen_6_k(address, tile, width, to)


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
        _widen_tile(matrix, tile, np.int64(out_NI[n:].ctypes.data if whole else room_8I.ctypes.data))
        if not whole:
            out_NI[n] = room_8I[row_N[n] % TILE]
        n += TILE if whole else 1
