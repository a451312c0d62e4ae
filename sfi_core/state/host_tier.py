"""The host tier of a layer, every complete page of every request, and the copies between the tiers.

    host_PHX  [pages, KV heads, tokens of a page x (D + E)]

The keys of a page and head are followed by their values, so that one transfer brings both; with D = E this is
FreeKV's layout (page, head, 2, page size, d) (Sec. 4.2). Pages on the device are head-major too, so that a page is
copied as it is. Complete pages go to the host; for dense reads they come back in blocks, each copied while the block
before it is read.
"""

import copy
from collections.abc import Iterator, Sequence

import torch

from sfi_core.state.side_stream import SideStream

BLOCK = 1024  # most tokens of a block
SHARE = 16  # a block is at most 1/16 of the capacity
BUFFERS = 2
PLACES = (-1, -2)  # of the side, one for each buffer


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
        pages = self.host_PHX
        if pages.is_pinned():
            torch.cuda.synchronize()
        return self.over(torch.empty_like(pages, pin_memory=pages.is_pinned()).copy_(pages))

    def over(self, host_PHX: torch.Tensor) -> "HostTier":
        """Return a tier of the same layout over other pages."""
        other = copy.copy(self)
        other.host_PHX = host_PHX
        return other


def block_tokens(capacity: int, page: int) -> int:
    """Return the tokens of a block: whole pages, at most BLOCK tokens and 1 / SHARE of the capacity."""
    return max(1, min(BLOCK, capacity // SHARE) // page) * page


class HostStream:
    """Two buffers on the device for the blocks of all layers, and the pages on their way to the host.

    A block has `block` tokens; `side` runs the copies. The `buffers` are made for the first block.
    `copied_bytes` went to the device, `offloaded_bytes` to the host.
    """

    def __init__(self, side: SideStream, block: int, device: torch.device | None = None) -> None:
        self.side, self.block = side, block
        self.buffers: list[torch.Tensor] = []
        self.copied_bytes = self.offloaded_bytes = 0
        self.device = device or torch.device("cpu")
        self._leaving: dict[int, Sequence[tuple[int, torch.Tensor]]] = {}

    def offload(self, place: int, host: HostTier, complete: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy pages to a layer's host tier.

        `complete` has a first host page and the pages from there on, in the host's layout; they are kept
        until the next offload of `place`.
        """

        def job() -> None:
            for first, pages in complete:
                host.host_PHX[first : first + len(pages)].copy_(pages, non_blocking=True)

        self.side.wait(place)
        self.side.run(place, job)
        self._leaving[place] = complete
        self.offloaded_bytes += sum(pages.nbytes for _, pages in complete)

    def blocks(
        self, host: HostTier, first: int, pages: int, head: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Copy `pages` consecutive host pages from a request's `first` on, of one KV head or all.

        Yields:
            Position of a block's first token, its keys [1, H, N, D] and values [1, H, N, E].
        """
        heads = slice(None) if head is None else slice(head, head + 1)
        source = host.host_PHX[first : first + pages, heads]
        size = self.block // host.page_size
        begins = range(0, pages, size)
        coming = self._copied(source, 0, size) if pages else source
        for at, begin in enumerate(begins):
            here = coming
            if at + 1 < len(begins):
                coming = self._copied(source, at + 1, size)
            self.side.wait(PLACES[at % BUFFERS])
            key, value = (x.transpose(0, 1).flatten(1, 2)[None] for x in host.split(here))
            yield begin * host.page_size, key, value

    def _copied(self, source: torch.Tensor, at: int, size: int) -> torch.Tensor:
        pages, place = source[at * size : (at + 1) * size], PLACES[at % BUFFERS]
        stage = self._buffer(at, size * source[0].numel(), source.dtype)[: pages.numel()]
        stage = stage.view(pages.shape)
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

    def _buffer(self, at: int, numbers: int, dtype: torch.dtype) -> torch.Tensor:
        if not self.buffers or self.buffers[0].numel() < numbers:
            self.side.join()  # copies under way still use the small buffers
            self.buffers = [torch.empty(numbers, dtype=dtype, device=self.device) for _ in range(BUFFERS)]
        return self.buffers[at % BUFFERS]


class RecallScratch:
    """Memory for one recall at a time: recalls run one after the other."""

    def __init__(self, side: SideStream) -> None:
        self._side = side
        self._flat: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the memory."""
        return sum(tensor.nbytes for tensor in self._flat)

    def like(self, segment: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return a buffer of `rows` requests for each of a segment's tensors, [B, ...]."""
        for at, tensor in enumerate(segment):
            size = rows * tensor[0].numel()
            if at == len(self._flat):
                self._flat.append(tensor.new_empty(size))
            elif self._flat[at].numel() < size:
                self._side.join()
                self._flat[at] = tensor.new_empty(size)
        return [
            flat[: rows * tensor[0].numel()].view(rows, *tensor.shape[1:])
            for flat, tensor in zip(self._flat, segment, strict=True)
        ]
