"""Recall: selected rows of host pages to the device, but for those that are on the device already."""

from sfi_kernels.op import Op
from sfi_kernels.recall import reference

recall = Op(reference.recall, triton="sfi_kernels.recall.triton")

__all__ = ["recall"]
