"""One layer of a two-tier KV store: what lies on the device, and the host's pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from sfi_core.state.host_tier import HostTier
from sfi_core.state.layer_pages import LayerPages


@dataclass(slots=True)
class Tiers:
    """One layer's two tiers.

    Attributes:
        ring: Pages of the recent tokens.
        host: Pages of all tokens, the last page of a request once it is complete.
        norm_BHT: Norms of all keys, float32.
        resident: KV heads that are never offloaded.
        key_BRTD: Their keys.
        value_BRTE: Their values.
    """

    ring: LayerPages
    host: HostTier
    norm_BHT: torch.Tensor
    resident: tuple[int, ...]
    key_BRTD: torch.Tensor
    value_BRTE: torch.Tensor

    @classmethod
    def allocate(
        cls,
        key: torch.Tensor,
        value: torch.Tensor,
        page_size: int,
        *,
        ring: int,
        host: int,
        batch: int,
        resident: Sequence[int],
    ) -> Self:
        """Allocate a layer for keys and values such as these, [B, H, T, D] and [B, H, T, E].

        Args:
            key: Some keys.
            value: Some values.
            page_size: Tokens of a page.
            ring: Pages on the device.
            host: Pages in host memory.
            batch: Requests.
            resident: KV heads that stay on the device.
        """
        H, capacity = key.shape[1], host // batch * page_size
        shape = (ring, H, page_size)
        return cls(
            ring=LayerPages(
                key.new_empty(*shape, key.shape[3]),
                value.new_empty(*shape, value.shape[3]),
                key.new_empty(shape, dtype=torch.float32),
            ),
            host=HostTier(host, page_size, key, value),
            norm_BHT=key.new_empty(batch, H, capacity, dtype=torch.float32),
            resident=tuple(sorted(resident)),
            key_BRTD=key.new_empty(batch, len(resident), capacity, key.shape[3]),
            value_BRTE=value.new_empty(batch, len(resident), capacity, value.shape[3]),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What lies on the device."""
        return (*self.ring.tensors, self.norm_BHT, self.key_BRTD, self.value_BRTE)

    def keep(
        self,
        row: int,
        start: int,
        key_HTD: torch.Tensor,
        value_HTE: torch.Tensor,
        norm_HT: torch.Tensor,
    ) -> None:
        """Keep what never leaves the device of a request's new tokens: norms, and the resident heads."""
        new = slice(start, start + norm_HT.shape[1])
        self.norm_BHT[row, :, new] = norm_HT
        for place, head in enumerate(self.resident):
            self.key_BRTD[row, place, new] = key_HTD[head]
            self.value_BRTE[row, place, new] = value_HTE[head]

    def complete(
        self, ring_page: int, start: int, key_HTD: torch.Tensor, value_HTE: torch.Tensor
    ) -> torch.Tensor:
        """Return the pages that new tokens complete, in the host's layout.

        Args:
            ring_page: The ring page that holds the first page's tokens before `start`, not yet written to.
            start: Position of the first new token.
            key_HTD: The new keys.
            value_HTE: The new values.
        """
        N = self.host.page_size
        if before := start % N:
            old_key, old_value = (x[ring_page, :, :before] for x in self.ring.tensors[:2])
            key_HTD = torch.cat([old_key, key_HTD], 1)
            value_HTE = torch.cat([old_value, value_HTE], 1)
        whole = key_HTD.shape[1] // N * N
        return self.host.joined(key_HTD[:, :whole], value_HTE[:, :whole])

    def unfinished(self, ring_page: int) -> torch.Tensor:
        """Return a page that is being written, in the host's layout."""
        key_HND, value_HNE = (pages[ring_page] for pages in self.ring.tensors[:2])
        return self.host.joined(key_HND, value_HNE)

    def kept(
        self, row: int, length: int, head: int | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a request's keys and values of one head, or all, if those never leave the device."""
        heads = tuple(range(self.norm_BHT.shape[1])) if head is None else (head,)
        if not set(heads) <= set(self.resident):
            return None
        place = self.resident.index(heads[0])
        one, own = slice(row, row + 1), slice(place, place + len(heads))
        return self.key_BRTD[one, own, :length], self.value_BRTE[one, own, :length]

    def copy(self) -> "Tiers":
        """Return tiers of their own with the same tokens."""
        return replace(
            self,
            ring=LayerPages(*(tensor.clone() for tensor in self.ring.tensors)),
            host=self.host.copy(),
            norm_BHT=self.norm_BHT.clone(),
            key_BRTD=self.key_BRTD.clone(),
            value_BRTE=self.value_BRTE.clone(),
        )

    def row(self, row: int, ring_pages: int, host_pages: int) -> "Tiers":
        """Return one request's part over the same memory; a request has so many pages in each tier."""
        ring = slice(row * ring_pages, (row + 1) * ring_pages)
        host = slice(row * host_pages, (row + 1) * host_pages)
        one = slice(row, row + 1)
        return replace(
            self,
            ring=LayerPages(*(tensor[ring] for tensor in self.ring.tensors)),
            host=self.host.over(self.host.host_PHX[host]),
            norm_BHT=self.norm_BHT[one],
            key_BRTD=self.key_BRTD[one],
            value_BRTE=self.value_BRTE[one],
        )
