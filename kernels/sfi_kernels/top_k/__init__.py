"""Top-K: from scores to the selected positions (Eq. 24)."""

from sfi_kernels.op import Op
from sfi_kernels.top_k import reference

top_k = Op(reference.top_k)
