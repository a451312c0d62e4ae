"""Rows times weight matrices."""

from sfi_kernels.compiled import entry
from sfi_kernels.loops.vectors import dot


@entry
def row_product(begin, end, weight_OI, row, out):
    """Multiply rows `begin` to `end` - 1 of a matrix by a vector."""
    for o in range(begin, end):
        out[o] = dot(weight_OI[o], row)
