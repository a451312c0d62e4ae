"""Rows times weight matrices, of float32 to 16 bits, or of a GGUF file's blocks as 8-bit numbers with their scales.

A matrix of blocks has one layout whatever the file's format: 8-bit numbers, a float32 scale for 32 or 16 of them, and
where the format has one a float32 minimum for 32. The rows that it multiplies are rounded to 16 bits with a scale for
32 numbers: as quick as 8 bits, because a product of an 8-bit and a 16-bit number is one instruction either way, and
the results are float32's.

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
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT32, F, bits_of, dot, inner, real
from sfi_kernels.matrix import BIAS, BLOCK, FINE, IN, KIND, MINIMA, NUMBERS, OUT, SCALES

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


def _block_dot(per_block: int) -> Any:
    @intrinsic
    def block_dot(context: Any, numbers: Any, scales: Any, row: Any, row_scales: Any, output: Any, width: Any) -> Any:
        """Return the product of a matrix' row `output` and a rounded row, `per_block` scales for 32 numbers."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            number_p, scale_p, row_p, row_scale_p = (
                code.pointer(place, kind) for place, kind in enumerate((I8, F32, I16, F32))
            )
            output, width = given[3][4:]
            blocks = b.udiv(width, ir.Constant(I64, BLOCK))
            first, first_scale = b.mul(output, width), b.mul(output, b.mul(blocks, ir.Constant(I64, per_block)))
            sums = code.sums(per_block, 8)
            with cgutils.for_range(b, blocks, intp=I64) as loop:
                at = b.mul(loop.index, ir.Constant(I64, BLOCK))
                code.fetch(number_p, b.add(first, at), AHEAD)
                pairs = []
                for half in (0, 16):
                    here = b.add(at, ir.Constant(I64, half))
                    weight = b.sext(code.load(number_p, b.add(first, here), vector(I8, 16), 1), vector(I32, 16))
                    number = b.sext(code.load(row_p, here, vector(I16, 16), 2), vector(I32, 16))
                    product = b.mul(weight, number)  # x86 multiplies and adds neighbors in one instruction
                    pairs.append(b.add(*(code.pick(product, list(range(odd, 16, 2))) for odd in (0, 1))))
                row_scale = code.load(row_scale_p, loop.index, F32, 4)
                for place, pair in enumerate(pairs if per_block > 1 else [b.add(*pairs)]):
                    number = b.add(b.mul(loop.index, ir.Constant(I64, per_block)), ir.Constant(I64, place))
                    scale = b.fmul(code.load(scale_p, b.add(first_scale, number), F32, 4), row_scale)
                    code.add(sums[place], (b.sitofp(pair, vector(F32, 8)), code.spread(scale, 8)))
            whole = b.load(sums[0])
            for more in sums[1:]:
                whole = b.fadd(whole, b.load(more))
            return code.total(whole)

        return types.float32(numbers, scales, row, row_scales, types.int64, types.int64), generate

    return block_dot


def _float_dot(kind: int) -> Any:
    size = 4 if kind == FLOAT32 else 2

    @intrinsic
    def float_dot(context: Any, numbers: Any, row: Any, output: Any, width: Any) -> Any:
        """Return the product of a matrix' row `output` and a row, both of `width` numbers: a multiple of 32."""

        def generate(*given: Any) -> Any:
            code, b = Code(*given), given[1]
            number_p, row_p = code.pointer(0, F32 if kind == FLOAT32 else I16), code.pointer(1, F32)
            output, width = given[3][2:]
            (total,), first = code.sums(1, BLOCK), b.mul(output, width)
            with cgutils.for_range(b, b.udiv(width, ir.Constant(I64, BLOCK)), intp=I64) as loop:
                at = b.mul(loop.index, ir.Constant(I64, BLOCK))
                for line in range(0, BLOCK * size, 64):
                    code.fetch(number_p, b.add(first, at), AHEAD + line)
                code.add(total, (code.wide(number_p, b.add(first, at), kind, BLOCK), code.wide(row_p, at, 0, BLOCK)))
            return code.total(b.load(total))

        return types.float32(numbers, row, types.int64, types.int64), generate

    return float_dot


dot_of_32, dot_of_16 = _block_dot(1), _block_dot(2)
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
def _multiply_blocks(matrix, begin, end, q_RI, scale_RB, total_RB, out_RO):
    count, width = matrix[OUT], matrix[IN]
    per_block = 2 if matrix[KIND] == FINE else 1
    numbers = carray(at_int8(matrix[NUMBERS]), (count, width))
    scales = carray(at_float32(matrix[SCALES]), (count, width // BLOCK * per_block))
    for o in range(begin, end):
        for r in range(len(q_RI)):
            if per_block == 1:
                out_RO[r, o] = dot_of_32(numbers, scales, q_RI[r], scale_RB[r], np.int64(o), width)
            else:
                out_RO[r, o] = dot_of_16(numbers, scales, q_RI[r], scale_RB[r], np.int64(o), width)
    if matrix[MINIMA] != 0:
        minima = carray(at_float32(matrix[MINIMA]), (count, width // BLOCK))
        for o in range(begin, end):
            for r in range(len(q_RI)):
                out_RO[r, o] += dot(minima[o], total_RB[r])


@inner
def _multiply_floats(matrix, begin, end, x_RI, out_RO):
    count, width, kind = matrix[OUT], matrix[IN], matrix[KIND]
    floats = carray(at_float32(matrix[NUMBERS]), (count, width))
    halves = carray(at_uint16(matrix[NUMBERS]), (count, width))
    for o in range(begin, end):
        for r in range(len(x_RI)):
            if kind == FLOAT32:
                out_RO[r, o] = float_dot(floats, x_RI[r], np.int64(o), width)
            elif kind == BFLOAT16:
                out_RO[r, o] = bfloat16_dot(halves, x_RI[r], np.int64(o), width)
            else:
                out_RO[r, o] = float16_dot(halves, x_RI[r], np.int64(o), width)


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
def _widen_block(number, scale, minimum, to):
    for i in range(len(number)):
        to[i] = F(number[i]) * scale + minimum


@entry
def widen_rows(begin, end, row_N, matrix, out_NI):
    """Write rows of a matrix of blocks, of which some `row_N` has the numbers, as float32; bit by bit as gguf does."""
    count, width = matrix[OUT], matrix[IN]
    group = 16 if matrix[KIND] == FINE else BLOCK
    numbers = carray(at_int8(matrix[NUMBERS]), (count, width))
    scales = carray(at_float32(matrix[SCALES]), (count, width // group))
    minima = carray(at_float32(matrix[MINIMA]), (count, width // BLOCK))
    for n in range(begin, end):
        o = row_N[n]
        for g in range(width // group):
            part = slice(g * group, g * group + group)
            minimum = minima[o, g] if matrix[MINIMA] != 0 else F(-0.0)  # adding it changes no bit
            _widen_block(numbers[o, part], scales[o, g], minimum, out_NI[n, part])
