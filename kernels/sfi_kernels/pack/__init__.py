"""Gather the sink and selected rows into the packed segment, from pages on the device or, in a recall, on the host."""

from sfi_kernels.op import Op
from sfi_kernels.pack import reference

pack = Op(reference.pack)
recall = Op(reference.recall)
pack_layers = reference.pack_layers
