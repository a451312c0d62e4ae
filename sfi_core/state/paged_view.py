"""A view of paged keys and values. `KVCache` or vLLM (`hosts/vllm/borrowed.py`) owns and writes the pages.

Each layer has heads before tokens:

    key_PHND    [pages, KV heads, tokens of a page, head dimension]
    value_PHNE  the same, with the values' width
    norm_PHN    [pages, KV heads, tokens of a page] float32, the norms of the keys

A request's row of the block table lists its pages. Position j is the j-th token of the request.
"""

import copy
from collections.abc import Iterator, Sequence
from typing import Self

import torch

from sfi_core.state.kv_store import KVStore
from sfi_core.state.layer_pages import LayerPages, LayerTable, tokens_of
from sfi_core.state.packed_segment import PackedSegment
from sfi_kernels.pack import pack
from sfi_kernels.pages import read_pages


class PagedView(KVStore):
    """Reads the pages of every layer by one block table; has no `append` and `grow`."""

    whole_on_device = True

    def __init__(self, backend: str, page_size: int, block_table_BP: torch.Tensor) -> None:
        """View the pages of a block table."""
        self.batch, self.backend = len(block_table_BP), backend
        self.page_size, self.block_table_BP = page_size, block_table_BP
        self.layers: LayerTable[LayerPages] = LayerTable()

    def pages(self, layer: int) -> LayerPages:
        """See `KVStore`."""
        return self.layers[layer]

    def pack_into(
        self,
        segment: PackedSegment,
        layer: int,
        request_R: torch.Tensor,
        sink_R: torch.Tensor,
        index_RHK: torch.Tensor,
        most_sink: int,
        heads_RH: torch.Tensor | None = None,
    ) -> None:
        """See `KVStore`: one kernel gathers the rows from the pages (Reorg)."""
        segment.reserve(most_sink + index_RHK.shape[2])
        key_PHND, value_PHNE, _ = self.layers[layer].tensors
        chosen = self.block_table_BP, request_R, index_RHK, sink_R
        heads = None if heads_RH is None else heads_RH.int()
        pack.on(self.backend)(key_PHND, value_PHNE, *chosen, *segment.tensors, heads_RH=heads)

    def blocks(
        self, layer: int, row: int, length: int, head: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """See `KVStore`: one block, a view if one page holds the request."""
        own = slice(None) if head is None else slice(head, head + 1)
        pages, table_P = self.layers[layer], self.block_table_BP[row]
        key, value = (x[:, own] for x in (pages.key_PHND, pages.value_PHNE))
        yield 0, read_pages(key, table_P, 0, length), read_pages(value, table_P, 0, length)

    def norms(self, layer: int, rows: Sequence[int], length: int) -> torch.Tensor:
        """See `KVStore`."""
        # rows one by one: a list as an index would wait for the device
        used = -(-length // self.page_size)
        page_RP = torch.stack([self.block_table_BP[row, :used] for row in rows])
        norm_RHPN = self.layers[layer].norm_PHN[page_RP.long()].transpose(1, 2)
        return norm_RHPN.flatten(2)[:, :, :length]

    def norms_of(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """See `KVStore`."""
        norm_PHN = self.layers[layer].norm_PHN
        norm = norm_PHN.flatten(0, 1).index_select(0, page_RHP.flatten())
        return norm.view(*page_RHP.shape[:2], self.capacity)

    def row(self, row: int) -> Self:
        """See `KVStore`: a view of batch 1 over the same pages."""
        one = copy.copy(self)
        one.batch, one.block_table_BP = 1, self.block_table_BP[row : row + 1]
        return one

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        page_PHNX = self.layers[layer].tensors[which]
        return tokens_of(page_PHNX, self.block_table_BP[row], start, stop)
