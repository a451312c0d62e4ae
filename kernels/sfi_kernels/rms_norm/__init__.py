"""RMSNorm as transformers rounds it, alone or after a residual sum."""

from sfi_kernels.op import Op
from sfi_kernels.rms_norm import reference
from sfi_kernels.rms_norm.reference import MAX_WIDTH

rms_norm = Op(reference.rms_norm)
add_rms_norm = Op(reference.add_rms_norm)

__all__ = ["MAX_WIDTH", "add_rms_norm", "rms_norm"]
