"""The interface of KV stores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sfi_core.state.layer_pages import LayerPages, LayerTable, PackedSegment
from sfi_core.state.side_stream import Job, SideStream
from sfi_kernels.pages import Ring


@dataclass(slots=True)
class Recall:
    """A recall of selected rows from the host, each of `row_bytes`, key and value.

    `rows_RH` are their numbers by refreshed request and KV head, int32, on the device, once they have arrived. The step
    `waited` so many seconds on the host, 0 if the recall runs beside it. `then` runs a job after the rows have arrived.
    """

    rows_RH: torch.Tensor
    row_bytes: int
    waited: float
    then: Callable[[Job], None]


class KVStore(Protocol):
    """The keys, values and key norms of a batch of requests, by layer; their tokens are `RequestState.length`.

    `block_table_BP` has each request's page numbers, int32; `layers` what the store keeps of each layer that it knows.
    The `pages` hold all tokens; those of a store that is not `whole_on_device` are in host memory, but for layers
    without a `ring`. `side` brings rows from there. The requests begin with the same `shared` tokens, which are stored
    once, for all.
    """

    batch: int
    backend: str
    page_size: int
    block_table_BP: torch.Tensor
    layers: LayerTable[Any]
    whole_on_device: bool
    shared: int = 0
    side: SideStream

    @property
    def capacity(self) -> int:
        """Tokens that fit, per request."""
        return self.block_table_BP.shape[1] * self.page_size

    @property
    def heads(self) -> int:
        """KV heads of a layer; 1 while no layer is known."""
        return next((self.pages(layer).key_PHND.shape[1] for layer in self.layers), 1)

    def grow(self, capacity: int) -> None:
        """Grow to at least `capacity` tokens per request."""

    def append(
        self,
        layer: int,
        key_BHTD: torch.Tensor,
        value_BHTE: torch.Tensor,
        start_B: torch.Tensor,
        count_B: torch.Tensor,
        start: Sequence[int],
        count: Sequence[int],
    ) -> LayerPages:
        """Write each request's new tokens, the last `count` of T, from `start` on, like `start_B` and `count_B`.

        Of those, the `shared` tokens are left out, and may be missing from T.
        """

    def share(self, layer: int, key_1HTD: torch.Tensor, value_1HTE: torch.Tensor) -> None:
        """Write the `shared` tokens of a layer, T of them, before any request's own; without any do nothing."""
        del layer, key_1HTD, value_1HTE

    def pages(self, layer: int) -> LayerPages:
        """Return a layer's pages."""

    def ring(self, layer: int) -> Ring | None:
        """Return a layer's pages on the device with the recent tokens; None where all its pages are there."""
        del layer
        return None

    def staged(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return pages on the device with a request's first tokens, and their table, [1, P], until the next call."""
        del length
        key_PHND, value_PHNE, _ = self.pages(layer).tensors
        return key_PHND, value_PHNE, self.block_table_BP[row : row + 1]

    def count_read(self, layer: int, tokens: float) -> None:
        """Note that the device has read so many tokens of a layer over the link, if they are in host memory."""
        del layer, tokens

    def keys(self, layer: int, row: int, start: int, stop: int) -> torch.Tensor:
        """Return a request's keys of positions `start` to `stop` - 1, [1, H, T, D], without a sync."""
        return self._tokens(layer, row, start, stop, 0)

    def values(self, layer: int, row: int, start: int, stop: int) -> torch.Tensor:
        """Return a request's values likewise, [1, H, T, E]."""
        return self._tokens(layer, row, start, stop, 1)

    def _tokens(self, layer: int, row: int, start: int, stop: int, which: int) -> torch.Tensor:
        """Return keys (`which` 0) or values (1)."""

    def norms(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """Return key norms of requests in their first pages, [R, H, T] float32; undefined beyond a request's tokens.

        `page_RHP` are the requests' page numbers times H, plus the KV head.
        """

    def pack_into(
        self,
        segment: PackedSegment,
        layer: int,
        request_R: torch.Tensor,
        sink_R: torch.Tensor,
        index_RHK: torch.Tensor,
        most_sink: int,
        heads_RH: torch.Tensor | None = None,
    ) -> Recall | None:
        """Copy sinks and selected positions, ascending, into a layer's packed segment, which grows if it is too small.

        `most_sink` is the largest of `sink_R`. `heads_RH` are the KV heads whose rows change, bool; None for all.
        Return the recall from the host; None for a store without a host tier.
        """

    def ready(self, layer: int) -> None:
        """Let the main stream wait for the rows that `pack_into` brings to a layer; none by default."""
        del layer

    def join(self) -> None:
        """Let the main stream wait for all rows that `pack_into` brings; none by default."""
        self.side.join()

    def row(self, row: int) -> "KVStore":
        """Return one request's part as a store of batch 1 over the same memory, which must not grow."""
