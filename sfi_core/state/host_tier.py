"""The host tier of a layer: every complete page of every request, heads before tokens.

    host_PHX  [pages, KV heads, tokens of a page x (D + E)]

The keys of a page and head are followed by their values, so that one transfer brings both; with D = E this is
FreeKV's layout (page, head, 2, page size, d) (Sec. 4.2). Pages on the device are head-major too, so that a
page is copied as it is.
"""

import copy

import torch


class HostTier:
    """One layer's pages in host memory, pinned if the model is on a CUDA device."""

    def __init__(self, pages: int, page_size: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Allocate pages for keys [B, H, T, D] and values [B, H, T, E] such as these."""
        H, D, E = key.shape[1], key.shape[3], value.shape[3]
        pinned = key.device.type == "cuda"
        size = (pages, H, page_size * (D + E))
        self.host_PHX = torch.empty(size, dtype=key.dtype, pin_memory=pinned)
        self.page_size, self.width, self.value_width = page_size, D, E

    @property
    def key_PHND(self) -> torch.Tensor:
        """A view of the keys."""
        return self.split(self.host_PHX)[0]

    @property
    def value_PHNE(self) -> torch.Tensor:
        """A view of the values."""
        return self.split(self.host_PHX)[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value in one head."""
        return (self.width + self.value_width) * self.host_PHX.itemsize

    def split(self, page_PHX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values of pages in this layout, [P, H, N, D] and [P, H, N, E]."""
        P, H, _ = page_PHX.shape
        N, keys = self.page_size, self.page_size * self.width
        key, value = page_PHX[..., :keys], page_PHX[..., keys:]
        return key.view(P, H, N, self.width), value.view(P, H, N, self.value_width)

    def joined(self, key_HTD: torch.Tensor, value_HTE: torch.Tensor) -> torch.Tensor:
        """Return complete pages of tokens in this layout, on the tokens' device."""
        H, T, _ = key_HTD.shape
        parts = [rows_HTX.reshape(H, T // self.page_size, -1).transpose(0, 1) for rows_HTX in (key_HTD, value_HTE)]
        return torch.cat(parts, -1)

    def copy(self) -> "HostTier":
        """Return a copy of the tier, after all copies from the device have ended."""
        own = self.host_PHX
        if own.is_pinned():
            torch.cuda.synchronize()
        return self.over(torch.empty_like(own, pin_memory=own.is_pinned()).copy_(own))

    def over(self, host_PHX: torch.Tensor) -> "HostTier":
        """Return a tier of the same layout over other pages."""
        other = copy.copy(self)
        other.host_PHX = host_PHX
        return other
