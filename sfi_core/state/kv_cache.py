"""Paged keys and values: a view of pages that somebody owns, and the KV cache of a run, which owns its own.

Each layer has keys, values, and in float32 the norms of the keys, heads before tokens: [pages, KV heads, tokens of a
page, width]. A request's row of the block table lists its pages. Position j is the j-th token of the request: left
padding of a ragged batch is not stored. With one page per request (the default on a CPU) the pages are a contiguous
[B, H, T, D] tensor. Requests that begin alike share the whole pages of that beginning, which are written once: their
rows list the same first pages, and behind these each its own.
"""

import copy
from collections.abc import Sequence
from typing import Self

import torch

from sfi_core.state.kv_store import KVStore, Recall
from sfi_core.state.layer_pages import LayerPages, LayerTable, PackedSegment, tokens_of
from sfi_core.state.side_stream import SideStream
from sfi_kernels.pack import append, pack


class PagedView(KVStore):
    """Reads the pages of every layer by one block table; `KVCache` or a server writes them (`hosts/serving`)."""

    whole_on_device = True
    side = SideStream()

    def __init__(self, backend: str, page_size: int, block_table_BP: torch.Tensor) -> None:
        """View the pages of a block table."""
        self.batch, self.backend = len(block_table_BP), backend
        self.page_size, self.block_table_BP = page_size, block_table_BP
        self.layers: LayerTable[LayerPages] = LayerTable()

    def pages(self, layer: int) -> LayerPages:
        """See `KVStore`."""
        return self.layers[layer]

    def pack_into(
        self, segment: PackedSegment, layer: int, request_R: torch.Tensor, sink_R: torch.Tensor,
        index_RHK: torch.Tensor, most_sink: int, heads_RH: torch.Tensor | None = None,
    ) -> Recall | None:  # fmt: skip
        """See `KVStore`: one kernel gathers the rows from the pages (Reorg)."""
        segment.reserve(most_sink + index_RHK.shape[2])
        key_PHND, value_PHNE, _ = self.layers[layer].tensors
        chosen = self.block_table_BP, request_R, index_RHK, sink_R
        heads = None if heads_RH is None else heads_RH.int()
        pack.on(self.backend)(key_PHND, value_PHNE, *chosen, *segment.tensors, heads_RH=heads)
        return None

    def norms(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """See `KVStore`."""
        norm_PHN = self.layers[layer].norm_PHN
        norm = norm_PHN.flatten(0, 1).index_select(0, page_RHP.flatten())
        return norm.view(*page_RHP.shape[:2], -1)

    def row(self, row: int) -> Self:
        """See `KVStore`: a view of batch 1 over the same pages."""
        store = copy.copy(self)
        store.batch, store.block_table_BP = 1, self.block_table_BP[row : row + 1]
        return store

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        page_PHNX = self.layers[layer].tensors[which]
        return tokens_of(page_PHNX, self.block_table_BP[row], start, stop)


GROWTH = 256  # spare tokens for runs of unknown length


class KVCache(PagedView):
    """Owns the pages of every layer, allocated at the layer's first `append`; `grow` adds pages behind all others."""

    def __init__(
        self, batch: int, capacity: int, page_size: int | None = None, backend: str = "torch", *,
        dtype: torch.dtype | None = None, shared: int = 0,
    ) -> None:  # fmt: skip
        """Plan for `capacity` tokens in each of `batch` requests, each in one page, or in pages of `page_size`.

        All requests, those that take over a row too, begin with the same `shared` tokens, whole pages of them.
        """
        self._one_page, self._dtype = page_size is None, dtype
        page_size = page_size or capacity
        common, self.shared = shared // page_size, shared
        pages = -(-capacity // page_size) - common
        self._count = common + batch * pages
        common_BP = torch.arange(common, dtype=torch.int32).expand(batch, -1)
        own_BP = torch.arange(common, self._count, dtype=torch.int32).view(batch, pages)
        super().__init__(backend, page_size, torch.cat([common_BP, own_BP], 1))

    def append(
        self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, start_B: torch.Tensor,
        count_B: torch.Tensor, start: Sequence[int], count: Sequence[int],
    ) -> LayerPages:  # fmt: skip
        """See `KVStore`; raises `ValueError` beyond the capacity."""
        longest = max(map(sum, zip(start, count, strict=True)))
        if longest > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {longest}")
        if min(start) < self.shared:  # a prompt's pass: what `share` writes is left out
            there = [min(new, max(0, self.shared - first)) for first, new in zip(start, count, strict=True)]
            there_B = torch.tensor(there, dtype=torch.int32, device=start_B.device)
            start_B, count_B = start_B + there_B, count_B - there_B
        return self._write(layer, key_BHTD, value_BHTE, start_B, count_B)

    def share(self, layer: int, key_1HTD: torch.Tensor, value_1HTE: torch.Tensor) -> None:
        """See `KVStore`."""
        start_1, count_1 = torch.tensor([[0], [self.shared]], dtype=torch.int32, device=key_1HTD.device)
        self._write(layer, key_1HTD, value_1HTE, start_1, count_1)

    def _write(
        self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, start_B: torch.Tensor, count_B: torch.Tensor
    ) -> LayerPages:
        # to the first rows of the block table
        if self._dtype is not None:
            key_BHTD, value_BHTE = key_BHTD.to(self._dtype), value_BHTE.to(self._dtype)
        if layer not in self.layers:
            self.block_table_BP = self.block_table_BP.to(key_BHTD.device)
            self.layers[layer] = LayerPages.empty(key_BHTD, value_BHTE, self._count, self.page_size)
        pages, table_BP = self.layers[layer], self.block_table_BP[: len(key_BHTD)]
        append.on(self.backend)(key_BHTD, value_BHTE, start_B, count_B, *pages.tensors, table_BP)
        return pages

    def row(self, row: int) -> Self:
        """See `KVStore`: a cache of batch 1 over the same pages."""
        store = super().row(row)
        if self._one_page:
            store.block_table_BP = self.block_table_BP[:1]  # `store.layers` have its page alone, for contiguous views
            only = slice(row, row + 1)
            store.layers = self.layers.like((layer, pages.part(only)) for layer, pages in self.layers.items())
        return store

    def grow(self, capacity: int) -> None:
        """See `KVStore`: copies; one page per request gets larger, else requests get more pages."""
        if capacity <= self.capacity:
            return
        capacity = max(capacity + GROWTH, 2 * self.capacity)
        count, old_page = self._count, self.page_size
        if self._one_page:
            self.page_size = capacity
        else:
            more = -(-capacity // self.page_size) - self.block_table_BP.shape[1]
            self._count += self.batch * more
            added_BP = torch.arange(count, self._count, dtype=torch.int32)
            added_BP = added_BP.view(self.batch, more).to(self.block_table_BP.device)
            self.block_table_BP = torch.cat([self.block_table_BP, added_BP], 1)
        for pages in self.layers.values():
            for name in ("key_PHND", "value_PHNE", "norm_PHN"):
                small = getattr(pages, name)
                large = small.new_empty(self._count, small.shape[1], self.page_size, *small.shape[3:])
                large[:count, :, :old_page] = small
                setattr(pages, name, large)

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        if self._one_page:
            return self.layers[layer].tensors[which][row : row + 1, :, start:stop]
        return super()._tokens(layer, row, start, stop, which)
