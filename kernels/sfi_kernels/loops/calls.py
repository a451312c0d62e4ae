"""Calls of compiled functions by their address, with arguments in an array of int64."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from sfi_kernels.compiled import by_address
from sfi_kernels.loops.attention import read_rows
from sfi_kernels.loops.products import at_float32, at_int16, at_int64, at_uint16, multiply
from sfi_kernels.loops.rows import TILE
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT16, FLOAT32, inner, real
from sfi_kernels.tables import BLOCK, IN, SIZE

SIZES = 16  # most arguments


@intrinsic
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Call what `compiled.by_address` has compiled; both are addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [i64]).as_pointer())
        builder.call(function, [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


# --- a product

MATRIX, BEGIN, END, ROWS, FLOATS, ROUNDED, SCALES, TOTALS, RESULT, RESULT_WIDTH = range(10)


@by_address
def product(arguments):
    """Multiply rows by some outputs of a matrix."""
    a = carray(at_int64(arguments), (SIZES,))
    matrix = carray(at_int64(a[MATRIX]), (SIZE,))
    R, width, blocks = a[ROWS], matrix[IN], matrix[IN] // BLOCK
    multiply(
        matrix, a[BEGIN], a[END], carray(at_float32(a[FLOATS]), (R, width)), carray(at_int16(a[ROUNDED]), (R, width)),
        carray(at_float32(a[SCALES]), (R, blocks)), carray(at_float32(a[TOTALS]), (R, blocks)),
        carray(at_float32(a[RESULT]), (R, a[RESULT_WIDTH])),
    )  # fmt: skip


# --- attention to rows

KEYS, VALUES, NUMBERS, COUNT, QUERIES, QUERY, WIDTH, CAP = range(8)
ROOM, MOST, TOTAL, OUT, LOGITS, WRITTEN, LOGITS_WIDTH = range(8, 15)


@inner
def _read(kind, arguments):
    a = carray(at_int64(arguments), (SIZES,))
    many, Q, D = 1 << 40, a[QUERIES], a[WIDTH]  # no bound is checked
    read_rows(
        kind, carray(at_float32(a[KEYS]), (many, D)), carray(at_float32(a[VALUES]), (many, D)),
        carray(at_uint16(a[KEYS]), (many, D)), carray(at_uint16(a[VALUES]), (many, D)),
        carray(at_int64(a[NUMBERS]), (a[COUNT],)), a[COUNT], carray(at_float32(a[QUERY]), (Q, D)),
        real(np.int32(a[CAP])), carray(at_float32(a[ROOM]), (Q, TILE)), carray(at_float32(a[MOST]), (Q,)),
        carray(at_float32(a[TOTAL]), (Q,)), carray(at_float32(a[OUT]), (Q, D)),
        carray(at_float32(a[LOGITS]), (a[WRITTEN], a[LOGITS_WIDTH]))[:, :],
    )  # fmt: skip


@by_address
def read_float32(arguments):
    """Attend to rows of float32 pages."""
    _read(FLOAT32, arguments)


@by_address
def read_bfloat16(arguments):
    """Attend to rows of bfloat16 pages."""
    _read(BFLOAT16, arguments)


@by_address
def read_float16(arguments):
    """Attend to rows of float16 pages."""
    _read(FLOAT16, arguments)
