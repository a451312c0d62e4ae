"""Attention of a fast step: the packed segment and the recent pages, in one softmax."""

from sfi_kernels.op import Op
from sfi_kernels.sparse_attention import reference

sparse_attention = Op(reference.sparse_attention)
