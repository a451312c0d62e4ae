"""32-bit codes of keys, the logits of all keys from their codes, and the likeliest keys."""

from sfi_kernels.key_codes import reference
from sfi_kernels.key_codes.layout import BITS, CHANNELS, CodeBasis
from sfi_kernels.op import Op

WHERE = {"triton": "sfi_kernels.key_codes.triton", "numba": "sfi_kernels.key_codes.numba"}
encode_keys = Op(reference.encode_keys, **WHERE)
scan_codes = Op(reference.scan_codes, **WHERE)
choose_likeliest = Op(reference.choose_likeliest, **WHERE)

__all__ = ["BITS", "CHANNELS", "CodeBasis", "choose_likeliest", "encode_keys", "scan_codes"]
