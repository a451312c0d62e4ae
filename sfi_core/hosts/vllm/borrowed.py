"""vLLM's paged cache as a `KVStore`: vLLM allocates and appends, and rows are slots."""

from typing import Any, NoReturn

import torch

from sfi_core.state.layer_pages import LayerPages
from sfi_core.state.paged_view import PagedView


class BorrowedPages(PagedView):
    """The blocks of vLLM's cache, with norms of our own beside them."""

    def __init__(
        self, backend: str, page_size: int, slots: int, capacity: int, device: torch.device
    ) -> None:
        """View no layer yet.

        Args:
            backend: Whose ops run: "torch" or "triton".
            page_size: Tokens of a block.
            slots: Rows.
            capacity: Tokens that a request may reach.
            device: Where the blocks are.
        """
        table_BP = torch.zeros(slots, -(-capacity // page_size), dtype=torch.int32, device=device)
        super().__init__(backend, page_size, table_BP)

    def borrow(
        self,
        layer: int,
        key_PHND: torch.Tensor,
        value_PHNE: torch.Tensor,
        norm_X: torch.Tensor | None = None,
    ) -> None:
        """View a layer's blocks, with any strides, and add norms to them.

        Args:
            layer: Index of the layer.
            key_PHND: Its keys, [blocks, KV heads, tokens, width].
            value_PHNE: Its values.
            norm_X: Room for the norms, float32; they get room of their own where it is missing or too small.
        """
        shape = key_PHND.shape[:3]
        if norm_X is None or norm_X.numel() < shape.numel():
            norm_X = torch.empty(shape.numel(), dtype=torch.float32, device=key_PHND.device)
        norm_PHN = norm_X[: shape.numel()].view(shape).zero_()
        self.layers[layer] = LayerPages(key_PHND, value_PHNE, norm_PHN)

    def note_norms(self, layer: int, key_XHD: torch.Tensor, place_X: torch.Tensor) -> None:
        """Keep the norms of the keys that vLLM has just written.

        Args:
            layer: Index of the layer.
            key_XHD: The keys.
            place_X: Where they went: block times tokens of a block, plus the token; -1 for padding.
        """
        norm_PHN, N = self.layers[layer].norm_PHN, self.page_size
        norm_XH = torch.linalg.vector_norm(key_XHD, dim=-1, dtype=torch.float32)
        # padding goes to block 0, which vLLM gives to nobody
        place_X = place_X[: len(key_XHD)].clamp_min(0)
        norm_PHN[place_X // N, :, place_X % N] = norm_XH[: len(place_X)]

    def grow(self, capacity: int) -> None:
        """See `KVStore`.

        Raises:
            ValueError: There is less room; vLLM's `max_model_len` says how much there is.
        """
        if capacity > self.capacity:
            raise ValueError(f"cache holds {self.capacity} tokens a request, got {capacity}")

    def append(self, layer: int, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: vLLM appends."""
        raise TypeError("vLLM writes its own cache")

    def copy(self) -> NoReturn:
        """Refuse: vLLM owns the blocks."""
        raise TypeError("vLLM owns its own cache")
