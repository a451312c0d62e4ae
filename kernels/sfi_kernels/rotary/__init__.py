"""Rotary positions of queries and keys, after the norms of heads where a model has them."""

from sfi_kernels.op import Op
from sfi_kernels.rotary import reference
from sfi_kernels.rotary.reference import MAX_WIDTH

rotary = Op(reference.rotary)

__all__ = ["MAX_WIDTH", "rotary"]
