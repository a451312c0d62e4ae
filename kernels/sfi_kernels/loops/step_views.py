"""What the stages of a compiled step share: arrays at the addresses of its tables, and rows."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from sfi_kernels.loops.products import at_float32, at_int32, at_uint16
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT32, F, bits_of, inner
from sfi_kernels.step_descriptor import WORDS
from sfi_kernels.step_tables import Layer, Step


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
