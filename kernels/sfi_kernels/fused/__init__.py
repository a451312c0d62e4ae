"""What else a layer computes for a token: its norms, rotary positions, and the gate of its MLP."""

from sfi_kernels.fused import reference
from sfi_kernels.fused.reference import MAX_HEAD, MAX_ROW, Appending
from sfi_kernels.op import Op

rms_norm = Op(reference.rms_norm)
add_rms_norm = Op(reference.add_rms_norm)
rotary = Op(reference.rotary)
silu_mul = Op(reference.silu_mul)

__all__ = ["MAX_HEAD", "MAX_ROW", "Appending", "add_rms_norm", "rms_norm", "rotary", "silu_mul"]
