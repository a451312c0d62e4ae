"""Codes of keys in words of 32 bits, the logits of all keys from their codes, and the likeliest keys."""

from sfi_kernels.key_codes import reference
from sfi_kernels.key_codes.layout import SLOTS, CodeBasis, bits_of, words
from sfi_kernels.op import Op

encode_keys = Op(reference.encode_keys)
scan_codes = Op(reference.scan_codes)
choose_likeliest = Op(reference.choose_likeliest)

__all__ = ["SLOTS", "CodeBasis", "bits_of", "choose_likeliest", "encode_keys", "scan_codes", "words"]
