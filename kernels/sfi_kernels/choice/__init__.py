"""Choosing the likeliest keys, and the weight of those that are not read."""

from sfi_kernels.choice import reference
from sfi_kernels.op import Op

choose_likeliest = Op(
    reference.choose_likeliest,
    triton="sfi_kernels.choice.triton",
    numba="sfi_kernels.choice.numba",
)
