"""Recall: copy selected rows from host pages to the device, unless the device has them."""

from sfi_kernels.op import Op
from sfi_kernels.recall import reference

recall = Op(reference.recall)
