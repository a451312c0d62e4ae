"""The likeliest keys of a whole batch, by their codes: the choice of a `codescan` step, in three launches."""

from sfi_kernels.code_scan import reference
from sfi_kernels.code_scan.reference import KEPT, BatchCodes, Choice
from sfi_kernels.op import Op

WHERE = {"triton": "sfi_kernels.code_scan.triton"}
code_tokens = Op(reference.code_tokens, **WHERE)
code_scan = Op(reference.code_scan, **WHERE)

__all__ = ["KEPT", "BatchCodes", "Choice", "code_scan", "code_tokens"]
