"""The two tiers of a layer, every complete page of every request on the host, and the copies between the tiers.

    host_PHX  [pages, KV heads, tokens of a page x (D + E)]

The keys of a page and head are followed by their values, so that one transfer brings both; with D = E this is
FreeKV's layout (page, head, 2, page size, d) (Sec. 4.2). A page is copied as it is, to the host once it is complete;
for dense reads pages come back in blocks, each copied while the block before it is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from sfi_core.state.layer_pages import LayerPages
from sfi_core.state.side_stream import SideStream

BLOCK = 1024  # most tokens of a block
SHARE = 16  # a block is at most 1/16 of the capacity
BUFFERS = 2
PLACES = (-1, -2)  # of the side, one for each buffer


@dataclass(frozen=True, slots=True)
class LayerTiers:
    """One layer: on the device a ring of recent pages, norms and `resident` heads; on the host complete pages."""

    ring: LayerPages
    host_PHX: torch.Tensor
    norm_BHT: torch.Tensor
    resident: tuple[int, ...]
    key_BRTD: torch.Tensor
    value_BRTE: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on the device."""
        return (*self.ring.tensors, self.norm_BHT, self.key_BRTD, self.value_BRTE)

    def split(self, page_PHX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the keys and values of pages in the host's layout, [P, H, N, D] and [P, H, N, E]."""
        (P, H, _), (N, D) = page_PHX.shape, self.ring.key_PHND.shape[2:]
        key, value = page_PHX[..., : N * D], page_PHX[..., N * D :]
        return key.view(P, H, N, D), value.view(P, H, N, self.ring.value_PHNE.shape[3])

    def joined(self, key_HTD: torch.Tensor, value_HTE: torch.Tensor) -> torch.Tensor:
        """Return complete pages of tokens in the host's layout, on the tokens' device."""
        (H, T, _), N = key_HTD.shape, self.ring.key_PHND.shape[2]
        parts = [rows_HTX.reshape(H, T // N, -1).transpose(0, 1) for rows_HTX in (key_HTD, value_HTE)]
        return torch.cat(parts, -1)

    def complete(self, ring_page: int, start: int, key_HTD: torch.Tensor, value_HTE: torch.Tensor) -> torch.Tensor:
        """Return the pages that tokens from `start` on complete, in the host's layout; `ring_page` has those before."""
        N = self.ring.key_PHND.shape[2]
        if before := start % N:
            old_key, old_value = (x[ring_page, :, :before] for x in self.ring.tensors[:2])
            key_HTD = torch.cat([old_key, key_HTD], 1)
            value_HTE = torch.cat([old_value, value_HTE], 1)
        whole = key_HTD.shape[1] // N * N
        return self.joined(key_HTD[:, :whole], value_HTE[:, :whole])

    def resident_rows(self, row: int, length: int, head: int | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a request's keys and values of one head, or all, if these heads are resident."""
        heads = tuple(range(self.norm_BHT.shape[1])) if head is None else (head,)
        if not set(heads) <= set(self.resident):
            return None
        place = self.resident.index(heads[0])
        only, places = slice(row, row + 1), slice(place, place + len(heads))
        return self.key_BRTD[only, places, :length], self.value_BRTE[only, places, :length]

    def row(self, row: int, ring_pages: int, host_pages: int) -> "LayerTiers":
        """Return one request's part over the same memory, given the pages per request in each tier."""
        only, ring = slice(row, row + 1), self.ring.part(slice(row * ring_pages, (row + 1) * ring_pages))
        host_PHX = self.host_PHX[row * host_pages : (row + 1) * host_pages]
        return LayerTiers(
            ring, host_PHX, self.norm_BHT[only], self.resident, self.key_BRTD[only], self.value_BRTE[only]
        )


def block_tokens(capacity: int, page: int) -> int:
    """Return the tokens of a block: whole pages, at most BLOCK tokens and 1 / SHARE of the capacity."""
    return max(1, min(BLOCK, capacity // SHARE) // page) * page


class HostStream:
    """Two buffers on the device for the blocks of all layers, made for the first, and pages on their way to the host.

    A block has `block` tokens; `side` runs the copies: `copied_bytes` to the device, `offloaded_bytes` to the host.
    """

    def __init__(self, side: SideStream, block: int, device: torch.device | None = None) -> None:
        self.side, self.block = side, block
        self.buffers: list[torch.Tensor] = []
        self.copied_bytes = self.offloaded_bytes = 0
        self.device = device or torch.device("cpu")
        self._leaving: dict[int, Sequence[tuple[int, torch.Tensor]]] = {}

    def offload(self, place: int, host_PHX: torch.Tensor, complete: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy pages in the host's layout, each after its first host page, and keep them until the next of `place`."""

        def job() -> None:
            for first, pages in complete:
                host_PHX[first : first + len(pages)].copy_(pages, non_blocking=True)

        self.side.wait(place)
        self.side.run(place, job)
        self._leaving[place] = complete
        self.offloaded_bytes += sum(pages.nbytes for _, pages in complete)

    def blocks(
        self, tiers: LayerTiers, first: int, pages: int, head: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Copy `pages` consecutive host pages from a request's `first` on; yields as `KVStore.blocks`."""
        heads = slice(None) if head is None else slice(head, head + 1)
        source, page_size = tiers.host_PHX[first : first + pages, heads], tiers.ring.key_PHND.shape[2]
        size = self.block // page_size
        begins = range(0, pages, size)
        coming = self._copied(source, 0, size) if pages else source
        for at, begin in enumerate(begins):
            here = coming
            if at + 1 < len(begins):
                coming = self._copied(source, at + 1, size)
            self.side.wait(PLACES[at % BUFFERS])
            key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in tiers.split(here))
            yield begin * page_size, key, value

    def _copied(self, source: torch.Tensor, at: int, size: int) -> torch.Tensor:
        pages, place = source[at * size : (at + 1) * size], PLACES[at % BUFFERS]
        numbers = size * source[0].numel()
        if not self.buffers or self.buffers[0].numel() < numbers:
            self.side.join()  # copies under way still use the small buffers
            self.buffers = [torch.empty(numbers, dtype=source.dtype, device=self.device) for _ in range(BUFFERS)]
        stage = self.buffers[at % BUFFERS][: pages.numel()].view(pages.shape)
        self.side.wait(place)
        # strided pages one by one: PyTorch would gather them in host memory now, before earlier jobs have run
        whole = pages.is_contiguous()
        parts = [(stage, pages)] if whole else list(zip(stage, pages, strict=True))

        def job() -> None:
            for to, part in parts:
                to.copy_(part, non_blocking=True)

        self.side.run(place, job)
        self.copied_bytes += stage.nbytes
        return stage
