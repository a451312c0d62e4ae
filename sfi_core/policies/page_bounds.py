"""What Quest and FreeKV keep: the element-wise extremes of each page's keys, which bound the logits of a query."""

from dataclasses import dataclass, replace
from typing import Self

import torch

from sfi_core.policies.base import LayerContext
from sfi_core.state.layer_pages import LayerShape
from sfi_kernels.page_scan import LastStep, PageSummaries, summarize


@dataclass(frozen=True, slots=True)
class KeptPages:
    """The extremes of a layer's pages of `page` tokens for all rows, and what FreeKV's last step left."""

    page: int
    pages: PageSummaries
    last: LastStep | None = None

    @property
    def nbytes(self) -> int:
        """See `Kept`."""
        return sum(part.nbytes for part in (*self.pages, *(self.last or ())))

    def of(self, rows: slice) -> Self:
        """See `Kept`."""
        return replace(self, pages=self.pages.of(rows), last=None if self.last is None else self.last.of(rows))

    def grown(self, capacity: int) -> Self:
        """See `Kept`."""
        grown = self.pages.grown(capacity, self.page)
        return self if grown is self.pages else replace(self, pages=grown)

    def rewind(self, row: int, length: int) -> None:
        """Do nothing: a step computes the extremes of the pages that it writes to anew."""


def learn_pages(context: LayerContext, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the extremes of all pages of a request; return them, [H, P, D]."""
    kept, length = context.kept[place], context.states[place].length
    ends = summarize(context.keys(place, 0, length)[0], kept.page)
    for part_BHPD, end_HPD in zip(kept.pages, ends, strict=True):
        part_BHPD[0, :, : end_HPD.shape[1]] = end_HPD
    return ends


def extremes_bytes(layer: LayerShape, capacity: int, page: int) -> int:
    """Return the bytes of the extremes of the pages of `capacity` tokens, and of their scores."""
    numbers = 2 * layer.key_width * layer.itemsize + torch.float32.itemsize
    return -(-capacity // page) * layer.heads * numbers
