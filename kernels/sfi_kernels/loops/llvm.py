"""Loops in LLVM's own language, where numba's code does not become the vector instructions that a CPU has."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils

from sfi_kernels import compiled
from sfi_kernels.loops.vectors import BFLOAT16, FLOAT32

MATH = tuple(sorted(compiled.MATH))  # sums may change their order; infinity and NaN keep their meaning

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()


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
