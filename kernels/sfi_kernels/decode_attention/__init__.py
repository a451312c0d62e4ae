"""Attention of a decoding step: fast and slow requests together, or fast ones alone (Secs. 4.1, 4.2)."""

from sfi_kernels.decode_attention import reference
from sfi_kernels.decode_attention.reference import DecodeAttention, resident_programs
from sfi_kernels.op import Op

decode_attention = Op(reference.decode_attention)
sparse_attention = Op(reference.sparse_attention)

__all__ = ["DecodeAttention", "decode_attention", "resident_programs", "sparse_attention"]
