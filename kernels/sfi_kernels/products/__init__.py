"""A layer's products with few rows, with the norm before them and the gate or the sum behind them."""

from sfi_kernels.op import Op
from sfi_kernels.products import reference
from sfi_kernels.products.reference import MOST_ROWS

project = Op(reference.project)

__all__ = ["MOST_ROWS", "project"]
