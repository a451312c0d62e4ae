"""The gate of an MLP: SiLU of one projection times the other."""

from sfi_kernels.op import Op
from sfi_kernels.silu_mul import reference

silu_mul = Op(reference.silu_mul)
