"""Copies between the tiers: complete pages to the host, and blocks of pages back for dense reads.

A block is copied to the device while the block before it is read.
"""

from collections.abc import Iterator, Sequence

import torch

from sfi_core.state.host_tier import HostTier
from sfi_core.state.side_stream import SideStream

BLOCK = 1024  # most tokens of a block
SHARE = 16  # a block is at most 1/16 of the capacity
BUFFERS = 2
PLACES = (-1, -2)  # of the side, one for each buffer


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
