"""Attention of a decoding step: fast and slow requests together (Secs. 4.1, 4.2)."""

import torch

from sfi_kernels.decode_attention import reference
from sfi_kernels.decode_attention.reference import DecodeAttention
from sfi_kernels.launch import target
from sfi_kernels.op import Op

decode_attention = Op(reference.decode_attention)


def resident_programs(device: torch.device) -> int:
    """Return how many programs of the attention run at once: two on each processor."""
    return 2 * target(device).processors


__all__ = ["DecodeAttention", "decode_attention", "resident_programs"]
