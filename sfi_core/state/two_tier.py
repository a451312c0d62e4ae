"""The two-tier KV store: all keys and values in host memory, on the device those that steps read.

On the device a layer has a ring of pages with the recent tokens, the norms of all keys, and the KV heads that are never
offloaded (`resident`). Page p of a request is ring page p mod R, so that the block table never changes and kernels read
the recent tokens like any pages. Packed segment and page summaries belong to the engine and the policy.

A page is copied to the host when it is complete. `recall` copies selected rows back (FreeKV, Sec. 4.2;
SyncKV, Eq. 7) on a stream of its own; only the fast step that reads them waits for them. A dense read streams
the host's pages through two buffers. Without CUDA both tiers are host memory and the same code runs.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter

import torch

from sfi_core.errors import ConfigError
from sfi_core.state.host_tier import HostStream, LayerTiers, block_tokens
from sfi_core.state.kv_store import KVStore, Recall
from sfi_core.state.layer_pages import LayerPages, LayerTable, PackedSegment, tokens_of
from sfi_core.state.side_stream import Job, SideStream
from sfi_kernels.pack import append, recall
from sfi_kernels.step_descriptor import sent


class TwoTierStore(KVStore):
    """A `KVStore` with two tiers; a request's ring has `ring_pages`, R.

    Page p of a request has the numbers `block_table_BP` there and `host_table_BP` on the host, int32. `side` runs
    offloads, of layer i in place 2 i, and recalls, in 2 i + 1. `stream` copies pages to the host, and blocks back.
    """

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
    ) -> None:
        """Plan for `capacity` tokens in each of `batch` requests; a request's ring must hold its recent tokens.

        A `side` of None runs offloads and recalls in order. `resident` returns the resident KV heads, given a layer and
        its number of heads.
        """
        self.batch, self.backend, self.page_size = batch, backend, page_size
        self.pages_per_request = -(-capacity // page_size)
        self.ring_pages = min(ring_pages, self.pages_per_request)
        page_P, row_B1 = torch.arange(self.pages_per_request), torch.arange(batch)[:, None]
        self.block_table_BP = (row_B1 * self.ring_pages + page_P % self.ring_pages).int()
        self.host_table_BP = (row_B1 * self.pages_per_request + page_P).int()
        self.side = side or SideStream()
        self.layers: LayerTable[LayerTiers] = LayerTable()
        self._resident = resident
        # kept because PyTorch's allocator would reuse tensors that only another stream still reads
        self._recalling: dict[int, Job] = {}
        self._scratch = [torch.empty(0)] * 4  # memory for one recall at a time, by the segment's tensor
        self.stream = HostStream(self.side, block_tokens(self.capacity, page_size))
        self._end = [0] * batch  # tokens of each row, as of the last append

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, without packed segments and page summaries."""
        tensors = [tensor for tiers in self.layers.values() for tensor in tiers.tensors]
        return sum(x.nbytes for x in [*tensors, *self.stream.buffers, *self._scratch])

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory."""
        return sum(tiers.host_PHX.nbytes for tiers in self.layers.values())

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
        """See `KVStore`: write the ring, keep the norms, and offload the pages that are complete."""
        if layer not in self.layers:
            self.layers[layer] = self._allocate(layer, key_BHTD, value_BHTE)
        tiers, N = self.layers[layer], self.page_size
        norm_BHT = torch.linalg.vector_norm(key_BHTD, dim=-1, dtype=torch.float32)
        complete = []
        for row, (begin, new) in enumerate(zip(start, count, strict=True)):
            new_tokens = slice(key_BHTD.shape[2] - new, None)
            key_HTD, value_HTE = key_BHTD[row, :, new_tokens], value_BHTE[row, :, new_tokens]
            positions = slice(begin, begin + new)
            tiers.norm_BHT[row, :, positions] = norm_BHT[row, :, new_tokens]
            for place, head in enumerate(tiers.resident):
                tiers.key_BRTD[row, place, positions] = key_HTD[head]
                tiers.value_BRTE[row, place, positions] = value_HTE[head]
            if (begin + new) // N > begin // N:
                first = row * self.ring_pages + begin // N % self.ring_pages
                pages = tiers.complete(first, begin, key_HTD, value_HTE)
                complete.append((row * self.pages_per_request + begin // N, pages))
            self._end[row] = begin + new
        room = self.ring_pages * self.page_size
        if max(count) > room:  # the ring keeps the last tokens of a long piece
            lasts = [min(new, room) for new in count]
            begins = [b + n - k for b, n, k in zip(start, count, lasts, strict=True)]
            start_B, count_B = sent(torch.tensor([begins, lasts], dtype=torch.int32), start_B.device)
        append.on(self.backend)(key_BHTD, value_BHTE, start_B, count_B, *tiers.ring.tensors, self.block_table_BP)
        if complete:
            self.stream.offload(2 * layer, tiers.host_PHX, complete)
        return tiers.ring

    def pages(self, layer: int) -> LayerPages:
        """See `KVStore`: the ring."""
        return self.layers[layer].ring

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        # from the ring if it has all of them, else from the host
        ring_PHNX = self.layers[layer].ring.tensors[which]
        if start >= self._end[row] - self.ring_pages * self.page_size:
            return tokens_of(ring_PHNX, self.block_table_BP[row], start, stop)
        rows_1HTX = ring_PHNX.new_empty(1, ring_PHNX.shape[1], stop - start, ring_PHNX.shape[3])
        for first, *both in self.blocks(layer, row, stop):
            block_1HNX = both[which][:, :, max(0, start - first) :]
            end = first + both[which].shape[2] - start
            if end > 0:
                rows_1HTX[:, :, end - block_1HNX.shape[2] : end] = block_1HNX
        return rows_1HTX

    def blocks(
        self, layer: int, row: int, length: int, head: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """See `KVStore`: complete pages from the host through two buffers, then the ring's last page."""
        tiers = self.layers[layer]
        if (whole := tiers.resident_rows(row, length, head)) is not None:
            yield 0, *whole
            return
        N, first = self.page_size, row * self.pages_per_request
        complete = self._end[row] // N
        pages = min(-(-length // N), complete)
        for start, key, value in self.stream.blocks(tiers, first, pages, head):
            yield start, key[:, :, : length - start], value[:, :, : length - start]
        if length > complete * N:
            heads = slice(None) if head is None else slice(head, head + 1)
            page, rest = row * self.ring_pages + complete % self.ring_pages, length - complete * N
            key, value = (x[page : page + 1, heads, :rest] for x in tiers.ring.tensors[:2])
            yield complete * N, key, value

    def norms(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """See `KVStore`."""
        row_R = page_RHP[:, 0, 0] // (self.ring_pages * page_RHP.shape[1])
        return self.layers[layer].norm_BHT[:, :, : self.capacity].index_select(0, row_R)

    def pack_into(
        self, segment: PackedSegment, layer: int, request_R: torch.Tensor, sink_R: torch.Tensor,
        index_RHK: torch.Tensor, most_sink: int, heads_RH: torch.Tensor | None = None,
    ) -> Recall:  # fmt: skip
        """See `KVStore`: recall rows that the segment lacks from the host, beside the main stream."""
        tiers, place = self.layers[layer], 2 * layer + 1
        self.ready(layer)
        segment.reserve(most_sink + index_RHK.shape[2])
        self._offload_sinks(layer, tiers, most_sink)
        old = segment.tensors
        key, value, position, length = self._scratch_like(old, len(request_R))
        into = key, value, position, length
        fetched_RH = index_RHK.new_zeros(index_RHK.shape[:2])
        heads = None if heads_RH is None else heads_RH.int()

        def job() -> None:
            pages = *tiers.split(tiers.host_PHX), self.host_table_BP
            refreshed = request_R, index_RHK, sink_R
            recall.on(self.backend)(*pages, *refreshed, *old, *into, fetched_RH, heads_RH=heads)
            request = request_R.long()
            for target, source in zip(old, into, strict=True):
                target.index_copy_(0, request, source)

        began = perf_counter()
        self.side.run(place, job)
        self._recalling[layer] = job
        waited = perf_counter() - began if type(self.side) is SideStream else 0.0
        row_bytes = tiers.ring.row_bytes // index_RHK.shape[1]
        return Recall(fetched_RH, row_bytes, waited, partial(self.side.run, place))

    def ready(self, layer: int) -> None:
        """See `KVStore`: wait for the layer's recalls."""
        self.side.wait(2 * layer + 1)
        self._recalling.pop(layer, None)

    def row(self, row: int) -> "TwoTierStore":
        """See `KVStore`; copies under way end first."""
        self.side.join()
        store = copy.copy(self)
        store.batch = 1
        store.__dict__.update(_end=[0])
        store.block_table_BP, store.host_table_BP = self.block_table_BP[:1], self.host_table_BP[:1]
        store.layers = self.layers.like(
            (layer, tiers.row(row, self.ring_pages, self.pages_per_request)) for layer, tiers in self.layers.items()
        )
        return store

    def _allocate(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> LayerTiers:
        for name in ("block_table_BP", "host_table_BP"):
            setattr(self, name, getattr(self, name).to(key.device))
        self.stream.device = key.device
        H, row_numbers = key.shape[1], key.shape[3] + value.shape[3]
        host_size = self.batch * self.pages_per_request, H, self.page_size * row_numbers
        resident = tuple(sorted(self._resident(layer, H))) if self._resident else ()
        resident_size = self.batch, len(resident), self.capacity
        return LayerTiers(
            ring=LayerPages.empty(key, value, self.batch * self.ring_pages, self.page_size),
            host_PHX=torch.empty(host_size, dtype=key.dtype, pin_memory=key.device.type == "cuda"),
            norm_BHT=key.new_empty(self.batch, H, self.capacity, dtype=torch.float32),
            resident=resident,
            key_BRTD=key.new_empty(*resident_size, key.shape[3]),
            value_BRTE=value.new_empty(*resident_size, value.shape[3]),
        )

    def _scratch_like(self, segment: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        # a buffer of `rows` requests for each of a segment's tensors, [B, ...]; all recalls share it
        buffers = []
        for at, tensor in enumerate(segment):
            size = rows * tensor[0].numel()
            if self._scratch[at].numel() < size:
                self.side.join()
                self._scratch[at] = tensor.new_empty(size)
            buffers.append(self._scratch[at][:size].view(rows, *tensor.shape[1:]))
        return buffers

    def _offload_sinks(self, layer: int, tiers: LayerTiers, most_sink: int) -> None:
        # for requests so short that sinks are in an incomplete page
        N, unfinished = self.page_size, []
        for row, end in enumerate(self._end):
            page = end // N
            if page * N < min(most_sink, end):
                key_HND, value_HNE, _ = (x[row * self.ring_pages + page % self.ring_pages] for x in tiers.ring.tensors)
                unfinished.append((row * self.pages_per_request + page, tiers.joined(key_HND, value_HNE)))
        if unfinished:
            self.stream.offload(2 * layer, tiers.host_PHX, unfinished)
