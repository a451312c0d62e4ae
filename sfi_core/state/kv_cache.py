"""The paged KV cache of a run; `PagedView` describes the layout.

With one page per request (the default on a CPU) the pages are a contiguous [B, H, T, D] tensor. Left padding
is not stored: position j is the j-th token of the prompt for every request of a ragged batch.
"""

import copy
from collections.abc import Sequence

import torch

from sfi_core.state.layer_pages import LayerPages
from sfi_core.state.paged_view import PagedView
from sfi_kernels.append import append

GROWTH = 256  # spare tokens for runs of unknown length


class KVCache(PagedView):
    """Owns the pages of every layer, allocated at the layer's first `append`.

    The numbers of a request's pages, `pages_per_request`, are consecutive.
    """

    def __init__(self, batch: int, capacity: int, page_size: int | None = None, backend: str = "torch") -> None:
        """Plan for `capacity` tokens in each of `batch` requests; without a `page_size`, in one page each."""
        self._one_page = page_size is None
        page_size = page_size or capacity
        self.pages_per_request = -(-capacity // page_size)
        count = batch * self.pages_per_request
        table_BP = torch.arange(count, dtype=torch.int32).view(batch, self.pages_per_request)
        super().__init__(backend, page_size, table_BP)

    def append(
        self,
        layer: int,
        key_BHTD: torch.Tensor,
        value_BHTE: torch.Tensor,
        start_B: torch.Tensor,
        count_B: torch.Tensor,
        start: Sequence[int],
        count: Sequence[int],
    ) -> LayerPages:
        """See `KVStore`; raises `ValueError` beyond the capacity."""
        longest = max(map(sum, zip(start, count, strict=True)))
        if longest > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {longest}")
        if layer not in self.layers:
            self.layers[layer] = self._allocate(key_BHTD, value_BHTE)
        pages = self.layers[layer]
        append.on(self.backend)(key_BHTD, value_BHTE, start_B, count_B, *pages.tensors, self.block_table_BP)
        return pages

    def copy(self) -> "KVCache":
        """See `KVStore`."""
        other = copy.copy(self)
        other.layers = self.layers.like(
            (layer, LayerPages(*(tensor.clone() for tensor in pages.tensors))) for layer, pages in self.layers.items()
        )
        return other

    def row(self, row: int) -> "KVCache":
        """See `KVStore`: a cache of batch 1 over the same pages."""
        first, count = row * self.pages_per_request, self.pages_per_request
        one = copy.copy(self)
        one.batch = 1
        one.block_table_BP = self.block_table_BP[:1]  # `one.layers` begin with its pages
        one.layers = self.layers.like(
            (layer, LayerPages(*(tensor[first : first + count] for tensor in pages.tensors)))
            for layer, pages in self.layers.items()
        )
        return one

    def grow(self, capacity: int) -> None:
        """Grow to at least `capacity` tokens per request by copying, for runs of unknown length.

        One page per request gets larger; pages of a given size keep their numbers, and requests get more.
        """
        if capacity <= self.capacity:
            return
        capacity = max(capacity + GROWTH, 2 * self.capacity)
        count, old_page = self.batch * self.pages_per_request, self.page_size
        if self._one_page:
            self.page_size = capacity
        else:
            more = -(-capacity // self.page_size) - self.pages_per_request
            self.pages_per_request += more
            added_BP = torch.arange(count, count + self.batch * more, dtype=torch.int32)
            added_BP = added_BP.view(self.batch, more).to(self.block_table_BP.device)
            self.block_table_BP = torch.cat([self.block_table_BP, added_BP], 1)
        total = self.batch * self.pages_per_request
        for pages in self.layers.values():
            for name in ("key_PHND", "value_PHNE", "norm_PHN"):
                small = getattr(pages, name)
                large = small.new_empty(total, small.shape[1], self.page_size, *small.shape[3:])
                large[:count, :, :old_page] = small
                setattr(pages, name, large)

    def norms(self, layer: int, rows: Sequence[int], length: int) -> torch.Tensor:
        """See `KVStore`; a view if every request has one page and the rows are consecutive."""
        if not self._one_page:
            return super().norms(layer, rows, length)
        norm_BHT = self.layers[layer].norm_PHN[:, :, :length]
        first = rows[0]
        if list(rows) == list(range(first, first + len(rows))):
            return norm_BHT[first : first + len(rows)]
        return torch.stack([norm_BHT[row] for row in rows])

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        if self._one_page:
            return self.layers[layer].tensors[which][row : row + 1, :, start:stop]
        return super()._tokens(layer, row, start, stop, which)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> LayerPages:
        shape = (self.batch * self.pages_per_request, key.shape[1], self.page_size)
        self.block_table_BP = self.block_table_BP.to(key.device)
        return LayerPages(
            key.new_empty(*shape, key.shape[3]),
            value.new_empty(*shape, value.shape[3]),
            key.new_empty(shape, dtype=torch.float32),
        )
