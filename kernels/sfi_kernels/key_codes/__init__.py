"""Codes of keys in words of 32 bits, the logits of all keys from their codes, and the likeliest keys."""

from sfi_kernels.key_codes import reference
from sfi_kernels.key_codes.layout import SLOTS, CodeBasis, bits_of, words
from sfi_kernels.op import Op

WHERE = {"triton": "sfi_kernels.key_codes.triton", "numba": "sfi_kernels.key_codes.numba"}
encode_keys = Op(reference.encode_keys, **WHERE)
scan_codes = Op(reference.scan_codes, **WHERE)
choose_likeliest = Op(reference.choose_likeliest, **WHERE)

__all__ = [
    "SLOTS", "CodeBasis", "bits_of", "choose_likeliest", "encode_keys", "scan_codes", "words",
]  # fmt: skip
