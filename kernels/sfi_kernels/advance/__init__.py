"""The next step's descriptor, made on the device from the tokens just sampled."""

from sfi_kernels.advance import reference
from sfi_kernels.advance.state import StepRules, bitmaps
from sfi_kernels.op import Op

advance = Op(reference.advance, triton="sfi_kernels.advance.triton")

__all__ = ["StepRules", "advance", "bitmaps"]
