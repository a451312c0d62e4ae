"""What the stages of a compiled step share: arrays at the addresses of its tables, rows, tickets, barriers, and calls.

A function is called by its address with arguments in an array of int64, at places that have names here.
"""

from platform import machine
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from sfi_kernels.compiled import by_address
from sfi_kernels.loops.attention import read_rows
from sfi_kernels.loops.products import at_float32, at_int16, at_int32, at_int64, at_uint16, multiply
from sfi_kernels.loops.rows import TILE
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT16, FLOAT32, F, bits_of, inner, real
from sfi_kernels.step_descriptor import WORDS
from sfi_kernels.tables import BLOCK, IN, SIZE, Layer, Step

PATIENCE = 2000  # looks at a barrier until a thread lets others run
SIZES = 16  # most arguments
# the arguments of a product, and of attention to rows
MATRIX, BEGIN, END, ROWS, FLOATS, ROUNDED, SCALES, TOTALS, RESULT, RESULT_WIDTH = range(10)
KEYS, VALUES, NUMBERS, COUNT, QUERIES, QUERY, WIDTH, CAP = range(8)
ROOM, MOST, TOTAL, OUT, LOGITS, WRITTEN, LOGITS_WIDTH = range(8, 15)


@inner
def floats(address, rows, width):
    return carray(at_float32(address), (rows, width))


@inner
def vector(address, width):
    return carray(at_float32(address), (width,))


@inner
def requests(step):
    return carray(at_int32(step[Step.STEP_BX]), (step[Step.REQUESTS], WORDS))


@inner
def blocks(step):
    return carray(at_int32(step[Step.BLOCK_BP]), (step[Step.REQUESTS], step[Step.TABLE]))


@inner
def pages(step, layer, keys, values):
    # keys and values as rows, of float32 and of 16 bits
    rows, D = 1 << 40, step[Step.WIDTH]  # no bound is checked
    return (
        carray(at_float32(layer[keys]), (rows, D)), carray(at_float32(layer[values]), (rows, D)),
        carray(at_uint16(layer[keys]), (rows, D)), carray(at_uint16(layer[values]), (rows, D)),
    )  # fmt: skip


@inner
def row_of(step, layer, b, h, place):
    # the number of a token's row among the keys of a layer; a window has one request
    if layer[Layer.WINDOW]:
        return h * layer[Layer.WINDOW_ROOM] + place - layer[Layer.WINDOW_START]
    return page_row(blocks(step)[b], step[Step.HEADS], h, step[Step.PAGE], np.int64(place))


@inner
def page_row(block_P, H, h, N, place):
    return (np.int64(block_P[place // N]) * H + h) * N + place % N


@inner
def copy(x, y):
    for i in range(len(x)):
        y[i] = x[i]


@inner
def rms_norm(x, weight, eps, out):
    total = F(0)
    for i in range(len(x)):
        total += x[i] * x[i]
    factor = F(1) / np.sqrt(total / F(len(x)) + eps)
    for i in range(len(x)):
        out[i] = weight[i] * (x[i] * factor)


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


@inner
def put(kind, x, rows, half_rows, to):
    if kind == FLOAT32:
        copy(x, rows[to])
    else:
        _narrow(kind, x, half_rows[to])


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
def meet(sync, threads, met):
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


@inner
def take(sync, ticket, threads, turn):
    # the number of the next piece; without other threads that is the turn
    return _add_one(sync, ticket) if threads > 1 else turn


@intrinsic
def call(context: Any, address: Any, arguments: Any) -> Any:
    """Call what `compiled.by_address` has compiled; both are addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        function = builder.inttoptr(args[0], ir.FunctionType(ir.VoidType(), [i64]).as_pointer())
        builder.call(function, [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


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


def _reader(kind):
    @by_address
    def read(arguments):
        """Attend to rows of pages of a kind."""
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

    return read


READERS = tuple(map(_reader, (FLOAT32, BFLOAT16, FLOAT16)))
