"""The two-tier KV store: all keys and values in host memory, on the device those that steps read.

The host's pages are written with every token, by the launch that writes the device, so that they never lack one. Dense
reads take them in place: Triton kernels over the link, from pinned memory. On the device a layer has a ring of pages
with the recent tokens and the norms of all keys; layers and KV heads that are `resident` have all their pages there.
Page p of a request is ring page p mod R, so that no table changes and CUDA graphs can hold the steps. Packed segment
and page summaries belong to the engine and the policy.

`recall` reads selected rows from the host (FreeKV, Sec. 4.2; SyncKV, Eq. 7) on a stream of its own; only the step that
attends to them waits. Without CUDA both tiers are host memory and the same code runs.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter

import torch

from sfi_core.errors import ConfigError
from sfi_core.state.host_memory import HostMemory
from sfi_core.state.kv_cache import PagedView
from sfi_core.state.kv_store import Recall
from sfi_core.state.layer_pages import LayerPages, PackedSegment
from sfi_core.state.side_stream import Job, SideStream
from sfi_kernels.pack import append, recall
from sfi_kernels.pages import HeadPages, Ring


class TwoTierStore(PagedView):
    """A `KVStore` with two tiers; a request's ring has `ring_pages`, R. `side` runs the recalls, by layer."""

    whole_on_device = False

    def __init__(
        self,
        batch: int,
        capacity: int,
        *,
        page_size: int,
        ring_pages: int,
        backend: str = "torch",
        side: SideStream | None = None,
        resident: Callable[[int, int], Sequence[int]] | None = None,
        host_bytes: int = 0,
    ) -> None:
        """Plan for `capacity` tokens in each of `batch` requests; a request's ring must hold its recent tokens.

        A `side` of None runs recalls in order. `resident` returns the resident KV heads, given a layer and its number
        of heads; a layer whose heads all are has nothing in host memory, where `host_bytes` are planned.
        """
        self.pages_per_request = -(-capacity // page_size)
        self.ring_pages = min(ring_pages, self.pages_per_request)
        page_P, row_B1 = torch.arange(self.pages_per_request), torch.arange(batch)[:, None]
        super().__init__(backend, page_size, (row_B1 * self.pages_per_request + page_P).int())
        self.ring_table_BP = (row_B1 * self.ring_pages + page_P % self.ring_pages).int()
        self.side = side or SideStream()
        self.device = torch.device("cpu")
        self.traffic = Counter[str]()  # bytes over the link: `streamed`, read by dense attention or by a policy
        self._resident, self._rings, self._memory = resident, dict[int, Ring](), HostMemory(host_bytes)
        self._first = 0  # the first request's row in the pages
        # kept because PyTorch's allocator would reuse tensors that only another stream still reads
        self._recalling: dict[int, Job] = {}
        self._old = [torch.empty(0)] * 4  # a copy of one layer's segments, by tensor, for one recall at a time
        self._stage: list[torch.Tensor] = []

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, without packed segments and page summaries."""
        tensors = [pages.norm_PHN for pages in self.layers.values()]
        for layer, pages in self.layers.items():
            ring = self._rings.get(layer)
            tensors += [pages.key_PHND, pages.value_PHNE] if ring is None else ring[:2]
            tensors += [] if ring is None or ring.heads is None else ring.heads[1:]
        return sum(tensor.nbytes for tensor in [*tensors, *self._old, *self._stage])

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return self._bytes(self._rings)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._bytes(self.layers)

    def _bytes(self, layers: Iterable[int]) -> int:
        return sum(part.nbytes for layer in layers for part in self.layers[layer].tensors[:2])

    def grow(self, capacity: int) -> None:
        """See `KVStore`; raises `ConfigError`, since a device budget needs the run's length beforehand."""
        if capacity > self.capacity:
            raise ConfigError(
                f"a run under kv_device_budget must state its length, got {capacity} tokens after room for "
                f"{self.capacity}; give max_new_tokens"
            )

    def append(
        self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, start_B: torch.Tensor,
        count_B: torch.Tensor, start: Sequence[int], count: Sequence[int],
    ) -> LayerPages:  # fmt: skip
        """See `KVStore`: one launch writes the pages in both tiers."""
        if layer not in self.layers:
            self.allocate(layer, key_BHTD, value_BHTE)
        pages, ring = self.layers[layer], self._rings.get(layer)
        append.on(self.backend)(key_BHTD, value_BHTE, start_B, count_B, *pages.tensors, self.block_table_BP, ring=ring)
        return pages

    def ring(self, layer: int) -> Ring | None:
        """See `KVStore`."""
        return self._rings.get(self.layers.owners.get(layer, layer))

    def staged(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy a request's first `length` keys and values to the device, until the next call.

        For a piece of a prompt, whose queries would read them over the link many times. Return pages of keys and of
        values, and their table, [1, P].
        """
        used, stage = self._pages(row, 0, length), []
        for at, host_PHNX in enumerate(self.layers[layer].tensors[:2]):
            numbers = self.pages_per_request * host_PHNX[0].numel()
            if at == len(self._stage) or self._stage[at].numel() < numbers:
                self._stage[at : at + 1] = [torch.empty(numbers, dtype=host_PHNX.dtype, device=self.device)]
            stage.append(self._stage[at][:numbers].view(-1, *host_PHNX.shape[1:]))
            stage[at][: used.stop - used.start].copy_(host_PHNX[used], non_blocking=True)
        self.count_read(layer, (used.stop - used.start) * self.page_size)
        return stage[0], stage[1], torch.arange(self.pages_per_request, dtype=torch.int32, device=self.device)[None]

    def count_read(self, layer: int, tokens: float) -> None:
        """See `KVStore`."""
        if self.ring(layer) is not None:
            self.traffic["streamed"] += round(tokens * self.layers[layer].row_bytes)

    def pack_into(
        self, segment: PackedSegment, layer: int, request_R: torch.Tensor, sink_R: torch.Tensor,
        index_RHK: torch.Tensor, most_sink: int, heads_RH: torch.Tensor | None = None,
    ) -> Recall | None:  # fmt: skip
        """See `KVStore`: recall rows that the segment lacks from the host, beside the main stream."""
        if self.ring(layer) is None:
            return super().pack_into(segment, layer, request_R, sink_R, index_RHK, most_sink, heads_RH)
        self.ready(layer)
        segment.reserve(most_sink + index_RHK.shape[2])
        pages, parts, old = self.layers[layer], segment.tensors, self._old_like(segment, len(request_R))
        key_PHND, value_PHNE, _ = pages.tensors
        fetched_RH = index_RHK.new_zeros(index_RHK.shape[:2])
        heads = None if heads_RH is None else heads_RH.int()

        def job() -> None:
            row_R = request_R.clamp_min(0)
            for part, copy in zip(parts, old, strict=True):
                torch.index_select(part, 0, row_R, out=copy)
            chosen = self.block_table_BP, request_R, index_RHK, sink_R
            recall.on(self.backend)(key_PHND, value_PHNE, *chosen, *old, *parts, fetched_RH, heads_RH=heads)

        began = perf_counter()
        self.side.run(layer, job)
        self._recalling[layer] = job
        waited = perf_counter() - began if type(self.side) is SideStream else 0.0
        return Recall(fetched_RH, pages.row_bytes // index_RHK.shape[1], waited, partial(self.side.run, layer))

    def ready(self, layer: int) -> None:
        """See `KVStore`: wait for the layer's recalls."""
        self.side.wait(layer)
        self._recalling.pop(layer, None)

    def join(self) -> None:
        """See `KVStore`."""
        self.side.join()
        self._recalling.clear()

    def row(self, row: int) -> "TwoTierStore":
        """See `KVStore`; recalls under way end first."""
        self.join()
        store, pages = super().row(row), slice(row * self.ring_pages, (row + 1) * self.ring_pages)
        store._first, store.ring_table_BP = self._first + row, self.ring_table_BP[:1]  # noqa: SLF001
        store._rings = {  # noqa: SLF001
            layer: Ring(ring.key_PHND[pages], ring.value_PHNE[pages], store.ring_table_BP, ring.heads)
            for layer, ring in self._rings.items()
        }
        return store

    def allocate(self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> None:
        """Allocate a layer's pages for keys and values such as these.

        Raise `MemoryForecastError` if the system pins no host memory for them.
        """
        H, count = key_BHTD.shape[1], len(self.block_table_BP) * self.pages_per_request
        if not self.layers:
            self.device = key_BHTD.device
            self.block_table_BP, self.ring_table_BP = (
                table_BP.to(self.device) for table_BP in (self.block_table_BP, self.ring_table_BP)
            )
        resident = sorted(self._resident(layer, H)) if self._resident else []
        if len(resident) == H:
            self.layers[layer] = LayerPages.empty(key_BHTD, value_BHTE, count, self.page_size)
            return
        key, value, norm_PHN = LayerPages.empty(key_BHTD[:, :, :0], value_BHTE[:, :, :0], 0, self.page_size).tensors
        pages = [self._memory.take((count, *x.shape[1:]), x.dtype, pinned=x.is_cuda) for x in (key, value)]
        self.layers[layer] = LayerPages(pages[0], pages[1], norm_PHN.new_empty(count, *norm_PHN.shape[1:]))
        heads = None
        if resident:
            place_H = [resident.index(head) if head in resident else -1 for head in range(H)]
            kept = [x.new_empty(count, len(resident), *x.shape[2:]) for x in (key, value)]
            heads = HeadPages(torch.tensor(place_H, dtype=torch.int32, device=self.device), kept[0], kept[1])
        near = [x.new_empty(self.batch * self.ring_pages, *x.shape[1:]) for x in (key, value)]
        self._rings[layer] = Ring(near[0], near[1], self.ring_table_BP, heads)

    def _pages(self, row: int, start: int, stop: int) -> slice:
        # of a request's tokens
        first = (self._first + row) * self.pages_per_request
        return slice(first + start // self.page_size, first + -(-stop // self.page_size))

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        if self.ring(layer) is None:
            return super()._tokens(layer, row, start, stop, which)
        page_PHNX = self.layers[layer].tensors[which][self._pages(row, start, stop)]
        self.traffic["streamed"] += page_PHNX.nbytes
        rows_HTX = page_PHNX.to(self.device, non_blocking=True).transpose(0, 1).flatten(1, 2)
        before = start % self.page_size
        return rows_HTX[None, :, before : before + stop - start]

    def _old_like(
        self, segment: PackedSegment, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        # room for a copy of `rows` requests' part of a segment; all recalls share it
        for at, tensor in enumerate(segment.tensors):
            if self._old[at].numel() < tensor.numel():
                self.join()
                self._old[at] = tensor.new_empty(tensor.numel())
        key, value, position, length = (
            held[: rows * tensor[0].numel()].view(rows, *tensor.shape[1:])
            for held, tensor in zip(self._old, segment.tensors, strict=True)
        )
        return key, value, position, length
