"""What the loops share: bits and powers of float32 numbers, and loops over a row of them.

Loops over numbers are functions of their own, which LLVM turns into vector instructions more reliably.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from sfi_kernels.compiled import OPTIONS

F = np.float32
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # kinds of pages
LINE = 64  # bytes of a cache line

inner = njit(**OPTIONS)


@intrinsic
def prefetch(context: Any, rows: Any, row: Any) -> Any:
    """Fetch a row of a contiguous 2D array into the cache."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        stride = builder.extract_value(array.strides, 0)
        pointer, i32, i64 = ir.IntType(8).as_pointer(), ir.IntType(32), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        first = builder.gep(builder.bitcast(array.data, pointer), [builder.mul(args[1], stride)])
        for line in range(8):
            offset = ir.Constant(i64, LINE * line)
            with builder.if_then(builder.icmp_signed("<", offset, stride)):
                where = builder.gep(first, [offset])
                builder.call(fetch, [where, *(ir.Constant(i32, x) for x in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(rows, types.uint64), generate


@intrinsic
def bits_of(context: Any, x: Any) -> Any:
    """Return the bits of a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.int32))

    return types.int32(types.float32), generate


@intrinsic
def real(context: Any, bits: Any) -> Any:
    """Return the float32 of an int32's bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(types.float32))

    return types.float32(types.int32), generate


@inner
def exp(x):
    # of x <= 0, to a unit in the last place or two (Cephes); 0 below the normal numbers
    least = F(-100) if x < F(-100) else x  # noqa: FURB136 - NaN stays NaN
    n = np.floor(least * F(1.44269504) + F(0.5))
    r = least - n * F(0.693359375) + n * F(2.12194440e-4)
    p = F(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + F(c)
    power = np.int32(np.int32(n) + np.int32(127)) << np.int32(23)
    y = (p * r * r + r + F(1)) * real(power)
    return F(0) if x <= F(-87) else y


@inner
def _ordered(i):
    # the bits of a float as an integer of the same order, and back
    return np.int32(i ^ ((i >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inner
def largest(x):
    # by integers: a maximum of floats does not become vector instructions
    most = np.int32(-2147483648)
    for i in range(len(x)):
        most = max(most, _ordered(bits_of(x[i])))
    return real(_ordered(most))


@inner
def exp_row(x, most):
    total = F(0)
    for i in range(len(x)):
        x[i] = exp(x[i] - most)
        total += x[i]
    return total


@inner
def scale_row(x, factor):
    for i in range(len(x)):
        x[i] *= factor


@inner
def add_row(x, factor, y):
    for i in range(len(x)):
        y[i] += x[i] * factor


@inner
def dot(a, b):
    total = F(0)
    for i in range(len(a)):
        total += a[i] * b[i]
    return total


@inner
def _widen_bfloat16(source, to):
    for i in range(len(to)):
        to[i] = real(np.int32(np.int32(source[i]) << np.int32(16)))


@inner
def _widen_float16(source, to):
    for i in range(len(to)):
        half = np.int32(source[i])
        magnitude = real(np.int32((half & np.int32(0x7FFF)) << np.int32(13))) * F(2.0**112)
        sign = np.int32((half & np.int32(0x8000)) << np.int32(16))
        to[i] = real(np.int32(bits_of(magnitude) | sign))


@inner
def widen(kind, source, to):
    if kind == BFLOAT16:
        _widen_bfloat16(source, to)
    else:
        _widen_float16(source, to)
