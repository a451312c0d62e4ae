"""The paged KV cache of a run.

Per layer, K and V apart, heads before tokens, and the key norms beside them:

    key_PHND    [pages, KV heads, tokens of a page, head dimension]
    value_PHNE  the same, with the values' width
    norm_PHN    [pages, KV heads, tokens of a page] float32, written at append

A request's pages stand in its row of the block table. With one page per request (the default on a CPU) the
pages are a plain contiguous [B, H, T, D] tensor. A request keeps its own tokens only: left padding is dropped
on the way in, so position j is the j-th token of the prompt for every request of a ragged batch.
"""

import copy
from collections.abc import Iterator, Sequence

import torch

from sfi_core.state.layer_pages import LayerPages, tokens_of
from sfi_core.state.packed_segment import PackedSegment
from sfi_kernels.append import append
from sfi_kernels.pack import pack
from sfi_kernels.pages import read_pages

GROWTH = 256  # spare tokens when nobody said how long the run will be


class KVCache:
    """Pages of every layer and the block table they share.

    Attributes:
        capacity: Tokens that fit per request.
        page_size: Tokens of a page.
        block_table_BP: Page numbers, `[B, pages of a request]` int32.
        layers: Pages by layer; allocated when a layer's first keys tell their shape.
    """

    whole_on_device = True

    def __init__(
        self, batch: int, capacity: int, page_size: int | None = None, backend: str = "torch"
    ) -> None:
        """Plan for `capacity` tokens in each of `batch` requests.

        Args:
            batch: Requests.
            capacity: Tokens of a request.
            page_size: Tokens of a page; None is one page for each request, however large.
            backend: What appends: "torch" or "triton".
        """
        self.batch, self.backend = batch, backend
        self._one_page = page_size is None
        self.page_size = page_size or capacity
        self.pages_per_request = -(-capacity // self.page_size)
        self.capacity = self.pages_per_request * self.page_size
        count = batch * self.pages_per_request
        self.block_table_BP = torch.arange(count, dtype=torch.int32).view(batch, -1)
        self.layers: dict[int, LayerPages] = {}

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
        """See `KVStore`.

        Raises:
            ValueError: More tokens than the cache has room for.
        """
        longest = max(map(sum, zip(start, count, strict=True)))
        if longest > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {longest}")
        if layer not in self.layers:
            self.layers[layer] = self._allocate(key_BHTD, value_BHTE)
        pages = self.layers[layer]
        append.on(self.backend)(
            key_BHTD,
            value_BHTE,
            start_B,
            count_B,
            pages.key_PHND,
            pages.value_PHNE,
            pages.norm_PHN,
            self.block_table_BP,
        )
        return pages

    def pages(self, layer: int) -> LayerPages:
        """See `KVStore`."""
        return self.layers[layer]

    @property
    def heads(self) -> int:
        """See `KVStore`."""
        return next((pages.key_PHND.shape[1] for pages in self.layers.values()), 1)

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
        pages = self.layers[layer]
        pack.on(self.backend)(
            pages.key_PHND,
            pages.value_PHNE,
            self.block_table_BP,
            request_R,
            index_RHK,
            sink_R,
            segment.key_BHSD,
            segment.value_BHSE,
            segment.position_BHS,
            segment.length_BH,
            **({} if heads_RH is None else {"heads_RH": heads_RH.int()}),
        )

    def copy(self) -> "KVCache":
        """Return a cache of its own with the same tokens."""
        other = copy.copy(self)
        other.layers = {
            layer: LayerPages(*(tensor.clone() for tensor in pages.tensors))
            for layer, pages in self.layers.items()
        }
        return other

    def row(self, row: int) -> "KVCache":
        """See `KVStore`: a cache of batch 1 over the same pages."""
        first, count = row * self.pages_per_request, self.pages_per_request
        one = copy.copy(self)
        one.batch, one.block_table_BP = 1, self.block_table_BP[:1]  # its pages follow each other
        one.layers = {
            layer: LayerPages(*(tensor[first : first + count] for tensor in pages.tensors))
            for layer, pages in self.layers.items()
        }
        return one

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a request by copying; only for runs of unknown length.

        A request's one page gets larger. Pages of a given size keep their numbers, and every request gets new
        ones behind its own.
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
        self.capacity = self.pages_per_request * self.page_size
        total = self.batch * self.pages_per_request
        for pages in self.layers.values():
            for name in ("key_PHND", "value_PHNE", "norm_PHN"):
                small = getattr(pages, name)
                large = small.new_empty(total, small.shape[1], self.page_size, *small.shape[3:])
                large[:count, :, :old_page] = small
                setattr(pages, name, large)

    def ready(self, layer: int) -> None:
        """See `KVStore`: the device orders it by itself."""

    def blocks(
        self, layer: int, row: int, length: int, head: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """See `KVStore`: one block, a view where one page holds the request."""
        own = slice(None) if head is None else slice(head, head + 1)
        pages, table_P = self.layers[layer], self.block_table_BP[row]
        key, value = (x[:, own] for x in (pages.key_PHND, pages.value_PHNE))
        yield 0, read_pages(key, table_P, 0, length), read_pages(value, table_P, 0, length)

    def keys(self, layer: int, row: int, start: int, stop: int) -> torch.Tensor:
        """See `KVStore`."""
        return self._tokens(self.layers[layer].key_PHND, row, start, stop)

    def values(self, layer: int, row: int, start: int, stop: int) -> torch.Tensor:
        """See `KVStore`."""
        return self._tokens(self.layers[layer].value_PHNE, row, start, stop)

    def _tokens(self, page_PHNX: torch.Tensor, row: int, start: int, stop: int) -> torch.Tensor:
        if self._one_page:
            return page_PHNX[row : row + 1, :, start:stop]
        return tokens_of(page_PHNX, self.block_table_BP[row], start, stop)

    def norms(self, layer: int, rows: Sequence[int], length: int) -> torch.Tensor:
        """See `KVStore`.

        A view where every request has one page and the rows follow each other.
        """
        norm_PHN = self.layers[layer].norm_PHN
        if self._one_page:
            norm_BHT = norm_PHN[:, :, :length]
            first = rows[0]
            if list(rows) == list(range(first, first + len(rows))):
                return norm_BHT[first : first + len(rows)]
            return torch.stack([norm_BHT[row] for row in rows])
        # rows taken one by one: a list as an index would wait for the device
        used = -(-length // self.page_size)
        page_RP = torch.stack([self.block_table_BP[row, :used] for row in rows])
        norm_RHPN = norm_PHN[page_RP.long()].transpose(1, 2)
        return norm_RHPN.flatten(2)[:, :, :length]

    def norms_of(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """See `KVStore`."""
        norm_PHN = self.layers[layer].norm_PHN
        norm = norm_PHN.flatten(0, 1).index_select(0, page_RHP.flatten())
        return norm.view(*page_RHP.shape[:2], self.capacity)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> LayerPages:
        shape = (self.batch * self.pages_per_request, key.shape[1], self.page_size)
        self.block_table_BP = self.block_table_BP.to(key.device)
        return LayerPages(
            key.new_empty(*shape, key.shape[3]),
            value.new_empty(*shape, value.shape[3]),
            key.new_empty(shape, dtype=torch.float32),
        )
