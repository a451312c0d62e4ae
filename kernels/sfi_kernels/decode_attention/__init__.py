"""Attention of a decoding step: fast and slow requests together, or fast ones alone (Secs. 4.1, 4.2)."""

from sfi_kernels.decode_attention import reference
from sfi_kernels.decode_attention.reference import DecodeAttention, resident_programs, work_items
from sfi_kernels.op import Op

decode_attention = Op(reference.decode_attention)
sparse_attention = Op(reference.sparse_attention)
split_plan = Op(reference.split_plan)

__all__ = [
    "DecodeAttention", "decode_attention", "resident_programs", "sparse_attention", "split_plan", "work_items"
]  # fmt: skip
