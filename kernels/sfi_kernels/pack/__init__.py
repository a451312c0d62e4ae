"""Gather the sink and selected rows into the packed segment."""

from sfi_kernels.op import Op
from sfi_kernels.pack import reference

pack = Op(reference.pack)
pack_layers = reference.pack_layers
