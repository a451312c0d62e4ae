"""The paged KV cache of a run.

Per layer, K and V apart, heads before tokens, and the key norms beside them:

    key_PHND    [pages, KV heads, tokens of a page, head dimension]
    value_PHNE  the same, with the values' width
    norm_PHN    [pages, KV heads, tokens of a page] float32, written at append

A request's pages stand in its row of the block table. With one page per request (the default on a CPU) the
pages are a plain contiguous [B, H, T, D] tensor. A request keeps its own tokens only: left padding is dropped
on the way in, so position j is the j-th token of the prompt for every request of a ragged batch.
"""

from dataclasses import dataclass

import torch

from sfi_kernels.pages import read_pages

GROWTH = 256  # spare tokens when nobody said how long the run will be


@dataclass(slots=True)
class LayerPages:
    """One layer's pages."""

    key_PHND: torch.Tensor
    value_PHNE: torch.Tensor
    norm_PHN: torch.Tensor


class KVCache:
    """Pages of every layer and the block table they share.

    Attributes:
        capacity: Tokens that fit per request.
        page_size: Tokens of a page.
        block_table_BP: Page numbers, `[B, pages of a request]` int32.
        layers: Pages by layer; allocated when a layer's first keys tell their shape.
    """

    def __init__(self, batch: int, capacity: int, page_size: int | None = None) -> None:
        """Plan for `capacity` tokens in each of `batch` requests; `page_size` None is one page each."""
        self.batch = batch
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
        start: list[int],
        count: list[int],
    ) -> LayerPages:
        """Write each request's new tokens, the last `count[b]` of T, from position `start[b]` on.

        Raises:
            ValueError: More tokens than the cache has room for.
        """
        if layer not in self.layers:
            self.layers[layer] = self._allocate(key_BHTD, value_BHTE)
        pages, T = self.layers[layer], key_BHTD.shape[2]
        norm_BHT = torch.linalg.vector_norm(key_BHTD, dim=-1, dtype=torch.float32)
        for row, (first, new) in enumerate(zip(start, count, strict=True)):
            if first + new > self.capacity:
                raise ValueError(f"cache holds {self.capacity} tokens a request, got {first + new}")
            for source, page, offset, size in self._pieces(row, first, new):
                part = slice(T - new + source, T - new + source + size)
                pages.key_PHND[page, :, offset : offset + size] = key_BHTD[row, :, part]
                pages.value_PHNE[page, :, offset : offset + size] = value_BHTE[row, :, part]
                pages.norm_PHN[page, :, offset : offset + size] = norm_BHT[row, :, part]
        return pages

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a request by copying; only for runs of unknown length.

        Raises:
            ValueError: A request has several pages; such a cache does not grow.
        """
        if capacity <= self.capacity:
            return
        if self.pages_per_request > 1:
            raise ValueError(f"a cache of {self.pages_per_request} pages a request cannot grow")
        old, self.capacity = self.capacity, max(capacity + GROWTH, 2 * self.capacity)
        self.page_size = self.capacity
        for pages in self.layers.values():
            for name in ("key_PHND", "value_PHNE", "norm_PHN"):
                small = getattr(pages, name)
                large = small.new_empty(*small.shape[:2], self.capacity, *small.shape[3:])
                large[:, :, :old] = small
                setattr(pages, name, large)

    def norms(self, layer: int, row: int, length: int) -> torch.Tensor:
        """Return a request's key norms, [1, H, length] float32."""
        return read_pages(self.layers[layer].norm_PHN, self.block_table_BP[row], 0, length)

    def _allocate(self, key: torch.Tensor, value: torch.Tensor) -> LayerPages:
        shape = (self.batch * self.pages_per_request, key.shape[1], self.page_size)
        self.block_table_BP = self.block_table_BP.to(key.device)
        return LayerPages(
            key.new_empty(*shape, key.shape[3]),
            value.new_empty(*shape, value.shape[3]),
            key.new_empty(shape, dtype=torch.float32),
        )

    def _pieces(self, row: int, first: int, new: int) -> list[tuple[int, int, int, int]]:
        # (offset among the new tokens, page, offset in the page, tokens), one for each page touched
        pieces, done = [], 0
        while done < new:
            slot, offset = divmod(first + done, self.page_size)
            size = min(new - done, self.page_size - offset)
            pieces.append((done, row * self.pages_per_request + slot, offset, size))
            done += size
        return pieces
