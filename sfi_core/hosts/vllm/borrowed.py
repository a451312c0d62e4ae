"""vLLM's paged cache as a `KVStore`: vLLM allocates and appends; a row is a slot."""

from typing import Any, NoReturn

import torch

from sfi_core.state.kv_cache import PagedView
from sfi_core.state.layer_pages import LayerPages


class BorrowedPages(PagedView):
    """Views of the blocks of vLLM's cache, with our own key norms."""

    def __init__(self, backend: str, page_size: int, slots: int, capacity: int, device: torch.device) -> None:
        """View no layer yet; `capacity` are the tokens that a request may reach."""
        table_BP = torch.zeros(slots, -(-capacity // page_size), dtype=torch.int32, device=device)
        super().__init__(backend, page_size, table_BP)

    def borrow(
        self, layer: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, norm_X: torch.Tensor | None = None
    ) -> None:
        """View a layer's keys and values, [blocks, KV heads, tokens, width] of any strides, and add norms.

        `norm_X` is float32 room for the norms; a missing or too small one is replaced.
        """
        shape = key_PHND.shape[:3]
        if norm_X is None or norm_X.numel() < shape.numel():
            norm_X = torch.empty(shape.numel(), dtype=torch.float32, device=key_PHND.device)
        norm_PHN = norm_X[: shape.numel()].view(shape).zero_()
        self.layers[layer] = LayerPages(key_PHND, value_PHNE, norm_PHN)

    def note_norms(self, layer: int, key_XHD: torch.Tensor, place_X: torch.Tensor) -> None:
        """Store the norms of keys that vLLM has just written.

        `place_X` has block number * block size + token of each key; -1 for padding.
        """
        norm_PHN, N = self.layers[layer].norm_PHN, self.page_size
        norm_XH = torch.linalg.vector_norm(key_XHD, dim=-1, dtype=torch.float32)
        # padding goes to block 0, which vLLM gives to nobody
        place_X = place_X[: len(key_XHD)].clamp_min(0)
        norm_PHN[place_X // N, :, place_X % N] = norm_XH[: len(place_X)]

    def grow(self, capacity: int) -> None:
        """Raise `ValueError` beyond vLLM's `max_model_len`: the cache cannot grow."""
        if capacity > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {capacity}")

    def append(self, layer: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: vLLM appends."""
        raise TypeError("vLLM writes its own cache")

    def copy(self) -> NoReturn:
        """Refuse: vLLM owns the blocks."""
        raise TypeError("vLLM owns its own cache")
