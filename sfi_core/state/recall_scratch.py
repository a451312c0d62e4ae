"""A buffer for recalled rows before they are copied to the packed segment; all layers share it."""

from collections.abc import Sequence

import torch

from sfi_core.state.side_stream import SideStream


class RecallScratch:
    """Memory for one recall at a time: recalls run one after the other."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._flat: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return sum(tensor.nbytes for tensor in self._flat)

    def like(self, segment: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return a buffer of `rows` requests for each of a segment's tensors, [B, ...]."""
        for at, tensor in enumerate(segment):
            size = rows * tensor[0].numel()
            if at == len(self._flat):
                self._flat.append(tensor.new_empty(size))
            elif self._flat[at].numel() < size:
                self._side.join()
                self._flat[at] = tensor.new_empty(size)
        return [
            flat[: rows * tensor[0].numel()].view(rows, *tensor.shape[1:])
            for flat, tensor in zip(self._flat, segment, strict=True)
        ]
