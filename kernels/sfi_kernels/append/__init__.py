"""Appending new keys and values to the paged KV cache."""

from sfi_kernels.append import reference
from sfi_kernels.op import Op

append = Op(reference.append)
