"""Noting positions on a CPU, compiled."""

import torch

from sfi_kernels import loops
from sfi_kernels.shapes import check_int32, check_shape


def note_positions(
    request_R: torch.Tensor, index_RHK: torch.Tensor, sink_R: torch.Tensor,
    position_BHS: torch.Tensor, length_BH: torch.Tensor,
) -> None:  # fmt: skip
    """See `reference.note_positions`."""
    check_int32(index_RHK.device, index=index_RHK, position=position_BHS, length=length_BH)
    check_shape(index_RHK, "index", R=len(request_R), H=length_BH.shape[1], K=None)
    tensors = request_R, index_RHK, sink_R, position_BHS, length_BH
    loops.note_positions(*(tensor.numpy() for tensor in tensors))
