"""Attention of a fast step to rows that stay in their pages, by position."""

from sfi_kernels.attention_in_place import reference
from sfi_kernels.op import Op

attention_in_place = Op(reference.attention_in_place)
