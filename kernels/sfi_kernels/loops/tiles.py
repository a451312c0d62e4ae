"""A GGUF file's blocks as they lie in memory: products of eight rows of a matrix, and the same rows as float32.

A block is 32 numbers with a float16 scale, and where the format has one a float16 minimum. Of the K kinds eight blocks
have them, times an int8 number of each block, or of 16 of its numbers. Eight rows of a matrix are a tile: a line has
two numbers each of its rows, so that a vector of sums is of eight results, and the scales of eight rows lie together.
Numbers of 8 bits are bytes; of 4 and 5 bits a word of 16 bits holds one of each of four or three blocks.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfi_kernels.loops.vectors import F32, FLOAT16, I8, I16, I32, I64, Code, by_kind, vector
from sfi_kernels.tables import BLOCK, FINE_MINIMA, IN, KIND, LAYOUTS, MIDDLES, TILE

AHEAD = 2048  # bytes of a matrix that are fetched before their turn
LINE = vector(I16, 2 * TILE)
TALL = vector(F32, TILE)
PAIRS = BLOCK // 2  # lines of a block
GROUP = 8  # blocks of the K kinds that share a scale


class _Tile:
    """Code that reads a tile of a kind: where its blocks lie, and their numbers; `lowest` are scales without minima."""

    def __init__(self, code: Code, kind: int, matrix: Any, tile: Any, width: Any) -> None:
        self.code, (self.fields, self.parts, self.fine) = code, LAYOUTS[kind]
        b = code.builder
        matrix_p = b.inttoptr(matrix, I64.as_pointer())
        numbers, *factors = (code.load(matrix_p, code.count(place), I64, 8) for place in range(FINE_MINIMA + 1))
        self.scales, minima = factors[:2], factors[2:]
        self.has_minima = b.icmp_signed("!=", minima[0], code.count(0))
        self.lowest = [b.select(self.has_minima, *pair) for pair in zip(minima, self.scales, strict=True)]
        self.unit = I8 if self.fields == 1 else I16
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


def _write_product(code: Code, kind: int) -> None:
    b, (fields, parts, _) = code.builder, LAYOUTS[kind]
    _, matrix, tile, width, row, row_scales, totals, out = code.args
    rows, zero = _Tile(code, kind, matrix, tile, width), ir.Constant(vector(I32, TILE), [0] * TILE)
    unit = b.select(rows.has_minima, ir.Constant(F32, 1.0), ir.Constant(F32, -float(MIDDLES[kind])))
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
                code.add(lows, (rows.factor(rows.lowest, block, part), total))

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


def _write_wide(code: Code, kind: int) -> None:
    b, (fields, parts, _) = code.builder, LAYOUTS[kind]
    wide, floats = vector(I32, 2 * TILE), vector(F32, 2 * TILE)
    _, matrix, tile, width, out = code.args
    rows, twice = _Tile(code, kind, matrix, tile, width), [n // 2 for n in range(2 * TILE)]
    out_p = b.inttoptr(out, F32.as_pointer())
    middle = b.select(rows.has_minima, ir.Constant(I32, 0), ir.Constant(I32, MIDDLES[kind]))
    nothing = ir.Constant(TALL, [-0.0] * TILE)  # adding it changes no bit

    def write(block: Any, part: int) -> None:
        group, field = b.udiv(block, code.count(fields)), b.urem(block, code.count(fields))
        scale = code.pick(rows.factor(rows.scales, block, part), twice)
        minimum = code.pick(b.select(rows.has_minima, rows.factor(rows.lowest, block, part), nothing), twice)
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


@intrinsic
def multiply_tile(
    context: Any, kind: Any, matrix: Any, tile: Any, width: Any, row: Any, row_scales: Any, totals: Any, out: Any
) -> Any:
    """Write the products of a tile's rows and a rounded row, eight float32; all but the sizes are addresses."""
    return types.void(*[types.int64] * 8), by_kind(LAYOUTS, _write_product)


@intrinsic
def _widen(context: Any, kind: Any, matrix: Any, tile: Any, width: Any, out: Any) -> Any:
    """Write a tile's rows as float32, [`TILE`, I], to an address."""
    return types.void(*[types.int64] * 5), by_kind(LAYOUTS, _write_wide)


@njit(error_model="numpy", nogil=True)  # a product and a sum are rounded each, as numpy does it
def widen_tile(matrix, tile, to):
    # write a tile's rows as float32 to an address
    _widen(matrix[KIND], np.int64(matrix.ctypes.data), tile, matrix[IN], to)
