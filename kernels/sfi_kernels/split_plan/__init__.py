"""The plan that splits the requests' keys over the processors, made on the device each step."""

from sfi_kernels.op import Op
from sfi_kernels.split_plan import reference
from sfi_kernels.split_plan.reference import work_items

split_plan = Op(reference.split_plan)

__all__ = ["split_plan", "work_items"]
