"""32-bit codes of keys, and the logits of all keys from their codes."""

from sfi_kernels.key_codes import reference
from sfi_kernels.key_codes.layout import BITS, CHANNELS, CodeBasis
from sfi_kernels.op import Op

encode_keys = Op(reference.encode_keys, triton="sfi_kernels.key_codes.triton")
scan_codes = Op(reference.scan_codes, triton="sfi_kernels.key_codes.triton")

__all__ = ["BITS", "CHANNELS", "CodeBasis", "encode_keys", "scan_codes"]
