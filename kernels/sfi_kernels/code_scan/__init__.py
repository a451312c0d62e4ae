"""The likeliest keys of a whole batch, by their codes: the choice of a `codescan` step, in three launches."""

from sfi_kernels.code_scan import reference
from sfi_kernels.code_scan.codes import KEPT, SLOTS, BatchCodes, CodeBasis, bits_of, words
from sfi_kernels.op import Op

encode_keys = Op(reference.encode_keys)
code_tokens = Op(reference.code_tokens)
code_scan = Op(reference.code_scan)

__all__ = ["KEPT", "SLOTS", "BatchCodes", "CodeBasis", "bits_of", "words"]
__all__ += ["code_scan", "code_tokens", "encode_keys"]
