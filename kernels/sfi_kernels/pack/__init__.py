"""Rows of the cache: appended to pages, packed into segments, or recalled from pages on the host."""

from sfi_kernels.op import Op
from sfi_kernels.pack import reference

append = Op(reference.append)
pack = Op(reference.pack)
recall = Op(reference.recall)
pack_layers = reference.pack_layers
