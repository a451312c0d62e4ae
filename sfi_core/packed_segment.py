"""The packed segment: a request's sink and selected keys and values in one contiguous buffer (Sec. 4.2)."""

import torch

from sfi_core.kv_cache import LayerPages
from sfi_kernels.pack import pack


class PackedSegment:
    """One layer's packed rows, for every request.

    Attributes:
        key_BHSD: Keys; the first `length_BH` rows count: the sinks, then the selected in ascending order.
        value_BHSE: Values.
        index_BHS: Their positions, int32, padded with -1.
        length_BH: Rows that count, int32.
    """

    def __init__(self, batch: int, rows: int, pages: LayerPages) -> None:
        """Allocate `rows` rows for every request; `repack` makes room for more where it has to."""
        H, key, value = pages.key_PHND.shape[1], pages.key_PHND, pages.value_PHNE
        self.key_BHSD = key.new_empty(batch, H, rows, key.shape[3])
        self.value_BHSE = value.new_empty(batch, H, rows, value.shape[3])
        self.index_BHS = torch.full((batch, H, rows), -1, dtype=torch.int32, device=key.device)
        self.length_BH = torch.zeros(batch, H, dtype=torch.int32, device=key.device)

    def repack(
        self,
        row: int,
        sink: int,
        index_BHK: torch.Tensor | None,
        pages: LayerPages,
        table_BP: torch.Tensor,
    ) -> None:
        """Gather the first `sink` positions and the selected ones of a request (Reorg)."""
        H = self.length_BH.shape[1]
        anchors = torch.arange(sink, dtype=torch.int32, device=self.length_BH.device).expand(
            1, H, -1
        )
        index_BHS = anchors if index_BHK is None else torch.cat([anchors, index_BHK], 2)
        S = index_BHS.shape[2]
        if self.index_BHS.shape[2] < S:  # the cache grew past what the run was planned for
            self._grow(S)
        one = slice(row, row + 1)
        self.index_BHS[one].fill_(-1)[:, :, :S] = index_BHS
        self.length_BH[one] = (index_BHS >= 0).sum(2, dtype=torch.int32)
        if S:
            pack(pages.key_PHND, table_BP[one], index_BHS, self.key_BHSD[one])
            pack(pages.value_PHNE, table_BP[one], index_BHS, self.value_BHSE[one])

    def _grow(self, rows: int) -> None:
        B, H, old, _ = self.key_BHSD.shape
        for name in ("key_BHSD", "value_BHSE", "index_BHS"):
            small = getattr(self, name)
            large = small.new_empty(B, H, rows, *small.shape[3:])
            large[:, :, :old] = small
            setattr(self, name, large)
        self.index_BHS[:, :, old:] = -1
