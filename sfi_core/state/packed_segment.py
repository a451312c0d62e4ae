"""The packed segment: a request's sink and selected keys and values in one contiguous buffer (Sec. 4.2)."""

import copy

import torch

from sfi_core.state.layer_pages import LayerPages


class PackedSegment:
    """One layer's packed rows, for every request.

    Attributes:
        key_BHSD: Keys; the first `length_BH` rows count: the sinks, then the selected in ascending order.
        value_BHSE: Values.
        position_BHS: Their positions, int32, padded with -1.
        length_BH: Rows that count, int32.
    """

    def __init__(self, batch: int, rows: int, pages: LayerPages) -> None:
        """Allocate `rows` rows for every request of a batch, as wide as a layer's pages."""
        H, key, value = pages.key_PHND.shape[1], pages.key_PHND, pages.value_PHNE
        self.key_BHSD = key.new_empty(batch, H, rows, key.shape[3])
        self.value_BHSE = value.new_empty(batch, H, rows, value.shape[3])
        self.position_BHS = torch.full((batch, H, rows), -1, dtype=torch.int32, device=key.device)
        self.length_BH = torch.zeros(batch, H, dtype=torch.int32, device=key.device)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, positions and lengths."""
        return self.key_BHSD, self.value_BHSE, self.position_BHS, self.length_BH

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row(self, row: int) -> "PackedSegment":
        """Return one request's part, emptied, as a segment of batch 1 over the same rows."""
        one = copy.copy(self)
        for name in ("key_BHSD", "value_BHSE", "position_BHS", "length_BH"):
            setattr(one, name, getattr(self, name)[row : row + 1])
        one.position_BHS.fill_(-1)
        one.length_BH.zero_()
        return one

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows of every request, by copying where there is less."""
        B, H, old, _ = self.key_BHSD.shape
        if rows <= old:
            return
        for name in ("key_BHSD", "value_BHSE", "position_BHS"):
            small = getattr(self, name)
            large = small.new_empty(B, H, rows, *small.shape[3:])
            large[:, :, :old] = small
            setattr(self, name, large)
        self.position_BHS[:, :, old:] = -1
