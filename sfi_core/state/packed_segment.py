"""The packed segment: a request's sink and selected keys and values in one contiguous buffer (Sec. 4.2)."""

import copy
from dataclasses import dataclass

import torch

from sfi_core.state.layer_pages import LayerPages


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentShape:
    """The shape of a layer's packed rows, for a layer without pages."""

    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, pages: LayerPages) -> "SegmentShape":
        """Read the shape of a layer's pages."""
        key, value = pages.key_PHND, pages.value_PHNE
        return cls(
            heads=key.shape[1], key_width=key.shape[3], value_width=value.shape[3], dtype=key.dtype, device=key.device
        )

    def row_bytes(self, *, packs: bool) -> int:
        """Return the bytes of one row of all heads: its int32 position, and with `packs` its key and value."""
        width = self.key_width + self.value_width if packs else 0
        return self.heads * (width * self.dtype.itemsize + 4)


class PackedSegment:
    """One layer's packed rows, for every request: the sinks, then the selected, ascending.

    Only the first `length_BH` rows are read; `position_BHS` are their positions, padded with -1. Both are int32.
    """

    def __init__(self, batch: int, rows: int, like: "LayerPages | SegmentShape", *, packs: bool = True) -> None:
        """Allocate `rows` rows for every request of a batch, of the shape of `like`.

        Without `packs`, for rows that attention reads in the pages, there are positions only.
        """
        shape = like if isinstance(like, SegmentShape) else SegmentShape.of(like)
        H, device = shape.heads, shape.device
        self.key_BHSD, self.value_BHSE = (
            torch.empty(batch, H, rows if packs else 0, width, dtype=shape.dtype, device=device)
            for width in (shape.key_width, shape.value_width)
        )
        self.position_BHS = torch.full((batch, H, rows), -1, dtype=torch.int32, device=device)
        self.length_BH = torch.zeros(batch, H, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, positions and lengths."""
        return self.key_BHSD, self.value_BHSE, self.position_BHS, self.length_BH

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row(self, row: int) -> "PackedSegment":
        """Empty one request's rows and return them as a segment of batch 1 over the same memory."""
        segment = copy.copy(self)
        for name in ("key_BHSD", "value_BHSE", "position_BHS", "length_BH"):
            setattr(segment, name, getattr(self, name)[row : row + 1])
        segment.position_BHS.fill_(-1)
        segment.length_BH.zero_()
        return segment

    def reserve(self, rows: int) -> None:
        """Grow to at least `rows` rows for every request, by copying."""
        B, H, old = self.position_BHS.shape
        if rows <= old:
            return
        for name in ("key_BHSD", "value_BHSE", "position_BHS"):
            small = getattr(self, name)
            if small.shape[2] < old:  # it has no packed rows
                continue
            large = small.new_empty(B, H, rows, *small.shape[3:])
            large[:, :, :old] = small
            setattr(self, name, large)
        self.position_BHS[:, :, old:] = -1
