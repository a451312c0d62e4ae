"""What the loops share: bits and powers of float32 numbers, loops over a row of them, and code for LLVM.

Loops over numbers are functions of their own, which LLVM turns into vector instructions more reliably. Where numba's
code does not become those that a CPU has, intrinsics write LLVM's own language (`Code`).
"""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from sfi_kernels import compiled

F = np.float32
FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2  # kinds of pages
LINE = 64  # bytes of a cache line
MATH = tuple(sorted(compiled.MATH))  # sums may change their order; infinity and NaN keep their meaning

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

inner = njit(**compiled.OPTIONS)


@overload(operator.getitem, strict=False)
def _item_at(array: Any, place: Any) -> Any:
    # by a name of `tables`, for numba 0.65, which vLLM 0.32 insists on
    if isinstance(array, types.Array) and isinstance(place, types.IntEnumMember):
        return lambda array, place: array[place.value]
    return None


def _bitcast(kind: Any, other: Any) -> Any:
    @intrinsic
    def cast(context: Any, number: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(other))

        return other(kind), generate

    return cast


# the bits of a float32 as an int32, and back
bits_of, real = _bitcast(types.float32, types.int32), _bitcast(types.int32, types.float32)


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


def vector(kind: Any, count: int) -> Any:
    """Return the type of a vector of numbers."""
    return ir.VectorType(kind, count)


class Code:
    """What the generators below share: pointers, vectors and sums in LLVM's language."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.context, self.builder, self.signature, self.args = context, builder, signature, args

    def pointer(self, number: int, kind: Any) -> Any:
        """Return the pointer of an array among the arguments."""
        array = self.context.make_array(self.signature.args[number])(self.context, self.builder, self.args[number])
        return self.builder.bitcast(array.data, kind.as_pointer())

    def load(self, pointer: Any, at: Any, kind: Any, align: int) -> Any:
        """Load a value of a kind from element `at` of a pointer."""
        place = self.builder.bitcast(self.builder.gep(pointer, [at]), kind.as_pointer())
        return self.builder.load(place, align=align)

    def pick(self, numbers: Any, places: list[int], more: Any = None) -> Any:
        """Return some numbers of a vector, or of two: the places of the second follow."""
        mask = ir.Constant(vector(I32, len(places)), places)
        return self.builder.shuffle_vector(numbers, more or ir.Constant(numbers.type, ir.Undefined), mask)

    def spread(self, number: Any, count: int) -> Any:
        """Return a vector of one number."""
        nothing = ir.Constant(vector(number.type, count), ir.Undefined)
        return self.pick(self.builder.insert_element(nothing, number, ir.Constant(I32, 0)), [0] * count)

    def fetch(self, pointer: Any, at: Any, ahead: int) -> None:
        """Fetch the cache line of an element that lies `ahead` bytes behind another."""
        byte, kind = I8.as_pointer(), ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
        fetch = self.builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        place = self.builder.bitcast(self.builder.gep(pointer, [at]), byte)
        place = self.builder.gep(place, [ir.Constant(I64, ahead)])
        self.builder.call(fetch, [place, *(ir.Constant(I32, number) for number in (0, 3, 1))])

    def wide(self, pointer: Any, at: Any, kind: int, count: int) -> Any:
        """Load numbers of float32 or 16 bits as float32."""
        builder = self.builder
        if kind == FLOAT32:
            return self.load(pointer, at, vector(F32, count), 4)
        halves = self.load(pointer, at, vector(I16, count), 2)
        if kind == BFLOAT16:
            wide = builder.shl(builder.zext(halves, vector(I32, count)), ir.Constant(vector(I32, count), [16] * count))
            return builder.bitcast(wide, vector(F32, count))
        return builder.fpext(builder.bitcast(halves, vector(ir.HalfType(), count)), vector(F32, count))

    def size(self, number: int, dimension: int) -> Any:
        """Return a size of an array among the arguments."""
        array = self.context.make_array(self.signature.args[number])(self.context, self.builder, self.args[number])
        return self.builder.extract_value(array.shape, dimension)

    def count(self, number: int) -> Any:
        """Return a whole number as a constant."""
        return ir.Constant(I64, number)

    def loop(self, stop: Any, start: int = 0) -> Any:
        """Return the context of a loop over whole numbers; `.index` is the number."""
        return cgutils.for_range(self.builder, stop, start=self.count(start), intp=I64)

    def sums(self, count: int, width: int) -> list[Any]:
        """Return places for vectors of sums, zeros."""
        return [self.place(ir.Constant(vector(F32, width), [0.0] * width)) for _ in range(count)]

    def place(self, value: Any) -> Any:
        """Return a place for a value, which it has wherever the code comes by here."""
        place = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, place)
        return place

    def add(self, place: Any, product: tuple[Any, Any]) -> None:
        """Add a product of two vectors to a sum."""
        builder = self.builder
        product = builder.fmul(*product, flags=MATH)
        builder.store(builder.fadd(builder.load(place), product, flags=MATH), place)

    def total(self, numbers: Any) -> Any:
        """Return the sum of a vector's numbers."""
        width = numbers.type.count
        while width > 1:
            width //= 2
            low, high = self.pick(numbers, list(range(width))), self.pick(numbers, list(range(width, 2 * width)))
            numbers = self.builder.fadd(low, high, flags=MATH)
        return self.builder.extract_element(numbers, ir.Constant(I32, 0))


def by_kind(kinds: Iterable[int], write: Callable[[Code, int], None]) -> Any:
    """Return the generator of an intrinsic whose first argument says which of some kinds' code runs."""

    def generate(*given: Any) -> Any:
        code = Code(*given)
        for kind in kinds:
            with code.builder.if_then(code.builder.icmp_signed("==", code.args[0], code.count(kind))):
                write(code, kind)
        return code.context.get_dummy_value()

    return generate
