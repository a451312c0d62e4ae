"""One layer of a two-tier KV store: the device's tensors and the host's pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from sfi_core.state.host_tier import HostTier
from sfi_core.state.layer_pages import LayerPages


@dataclass(slots=True)
class LayerTiers:
    """One layer's two tiers: a `ring` of pages with the recent tokens, and all complete pages on the `host`.

    On the device there are also the norms of all keys, float32, and the keys and values of the `resident` KV
    heads, which are never offloaded.
    """

    ring: LayerPages
    host: HostTier
    norm_BHT: torch.Tensor
    resident: tuple[int, ...]
    key_BRTD: torch.Tensor
    value_BRTE: torch.Tensor

    @classmethod
    def allocate(
        cls, key: torch.Tensor, value: torch.Tensor, page_size: int, *, ring: int, host: int, batch: int,
        resident: Sequence[int],
    ) -> Self:  # fmt: skip
        """Allocate a layer for keys [B, H, T, D] and values [B, H, T, E] such as these.

        `ring` and `host` are numbers of pages, for all requests of the batch.
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
        """The tensors on the device."""
        return (*self.ring.tensors, self.norm_BHT, self.key_BRTD, self.value_BRTE)

    def keep(self, row: int, start: int, key_HTD: torch.Tensor, value_HTE: torch.Tensor, norm_HT: torch.Tensor) -> None:
        """Write a request's new norms and resident heads, which never leave the device."""
        new = slice(start, start + norm_HT.shape[1])
        self.norm_BHT[row, :, new] = norm_HT
        for place, head in enumerate(self.resident):
            self.key_BRTD[row, place, new] = key_HTD[head]
            self.value_BRTE[row, place, new] = value_HTE[head]

    def complete(self, ring_page: int, start: int, key_HTD: torch.Tensor, value_HTE: torch.Tensor) -> torch.Tensor:
        """Return the pages that new tokens complete, in the host's layout.

        `start` is the position of the first new token, not yet written to the ring; `ring_page` has the
        tokens of the same page before it.
        """
        N = self.host.page_size
        if before := start % N:
            old_key, old_value = (x[ring_page, :, :before] for x in self.ring.tensors[:2])
            key_HTD = torch.cat([old_key, key_HTD], 1)
            value_HTE = torch.cat([old_value, value_HTE], 1)
        whole = key_HTD.shape[1] // N * N
        return self.host.joined(key_HTD[:, :whole], value_HTE[:, :whole])

    def unfinished(self, ring_page: int) -> torch.Tensor:
        """Return an incomplete ring page in the host's layout."""
        key_HND, value_HNE = (pages[ring_page] for pages in self.ring.tensors[:2])
        return self.host.joined(key_HND, value_HNE)

    def kept(self, row: int, length: int, head: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a request's keys and values of one head, or all, if these heads are resident."""
        heads = tuple(range(self.norm_BHT.shape[1])) if head is None else (head,)
        if not set(heads) <= set(self.resident):
            return None
        place = self.resident.index(heads[0])
        only, places = slice(row, row + 1), slice(place, place + len(heads))
        return self.key_BRTD[only, places, :length], self.value_BRTE[only, places, :length]

    def copy(self) -> "LayerTiers":
        """Return a copy of both tiers."""
        return replace(
            self,
            ring=LayerPages(*(tensor.clone() for tensor in self.ring.tensors)),
            host=self.host.copy(),
            norm_BHT=self.norm_BHT.clone(),
            key_BRTD=self.key_BRTD.clone(),
            value_BRTE=self.value_BRTE.clone(),
        )

    def row(self, row: int, ring_pages: int, host_pages: int) -> "LayerTiers":
        """Return one request's part over the same memory, given the pages per request in each tier."""
        ring = slice(row * ring_pages, (row + 1) * ring_pages)
        host = slice(row * host_pages, (row + 1) * host_pages)
        only = slice(row, row + 1)
        return replace(
            self,
            ring=LayerPages(*(tensor[ring] for tensor in self.ring.tensors)),
            host=self.host.over(self.host.host_PHX[host]),
            norm_BHT=self.norm_BHT[only],
            key_BRTD=self.key_BRTD[only],
            value_BRTE=self.value_BRTE[only],
        )
