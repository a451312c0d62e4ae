"""The likeliest keys of a whole batch, by their codes: the choice of a `codescan` step, in three launches."""

from sfi_kernels.code_scan import reference
from sfi_kernels.code_scan.reference import KEPT, TOLD, BatchCodes, Choice, told_of
from sfi_kernels.op import Op

code_tokens = Op(reference.code_tokens)
code_scan = Op(reference.code_scan)

__all__ = ["KEPT", "TOLD", "BatchCodes", "Choice", "code_scan", "code_tokens", "told_of"]
