"""What the engine asks of a KV store, wherever its keys and values lie."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sfi_core.state.layer_pages import LayerPages
from sfi_core.state.packed_segment import PackedSegment
from sfi_core.state.side import Job


@dataclass(slots=True)
class Recall:
    """What a recall brought to the device.

    Attributes:
        rows_RH: Rows that came from the host, by refreshed request and KV head, int32, on the device; counted
            once the rows are there.
        row_bytes: Bytes of one, key and value.
        waited: Seconds that the step waited for the rows; 0 where they come beside it.
        then: Runs a job once the rows are there, where they come: beside the step or in it.
    """

    rows_RH: torch.Tensor
    row_bytes: int
    waited: float
    then: Callable[[Job], None]


class KVStore(Protocol):
    """The keys, values and key norms of a batch of requests, by layer.

    Lengths are not the store's: `RequestState.length` says how many tokens of a request count, and what lies
    behind them is never read.

    Attributes:
        batch: Requests.
        backend: Whose ops run: "torch" or "triton".
        page_size: Tokens of a page.
        block_table_BP: Page numbers of each request, int32.
        heads: KV heads of a layer; 1 while no layer is known.
        whole_on_device: Whether `pages` hold every token; otherwise only the recent ones, and the whole
            is read by `blocks`.
    """

    batch: int
    backend: str
    page_size: int
    block_table_BP: torch.Tensor
    whole_on_device: bool

    @property
    def capacity(self) -> int:
        """Tokens that fit per request."""

    @property
    def heads(self) -> int:
        """KV heads of a layer."""

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` tokens a request, if there is less."""

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
        """Write each request's new tokens, the last `count` of T, from position `start` on.

        Args:
            layer: Index of the layer.
            key_BHTD: New keys; whatever precedes a request's own is padding.
            value_BHTE: New values.
            start_B: Cached tokens of each request, int32.
            count_B: New tokens of each request, int32.
            start: The same as `start_B`, so that the device is not asked.
            count: The same as `count_B`.
        """

    def pages(self, layer: int) -> LayerPages:
        """Return a layer's pages."""

    def blocks(
        self, layer: int, row: int, length: int, head: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return a request's keys and values of positions 0 to `length`, block by block.

        Args:
            layer: Index of the layer.
            row: The request's row in the batch.
            length: Tokens to read.
            head: A KV head alone; None for all.

        Yields:
            The first position of a block, its keys [1, H, N, D] and values [1, H, N, E]; good until the next.
        """

    def keys(self, layer: int, row: int, start: int, stop: int) -> torch.Tensor:
        """Return a request's keys from `start` to before `stop`, [1, H, T, D], without asking the device."""

    def values(self, layer: int, row: int, start: int, stop: int) -> torch.Tensor:
        """Return a request's values likewise, [1, H, T, E]."""

    def norms(self, layer: int, rows: Sequence[int], length: int) -> torch.Tensor:
        """Return requests' key norms, [len(rows), H, length] float32; undefined beyond a request's tokens."""

    def norms_of(self, layer: int, page_RHP: torch.Tensor) -> torch.Tensor:
        """Return the key norms of requests by their pages, in one copy.

        Args:
            layer: Index of the layer.
            page_RHP: The requests' pages by KV head, int32: the page's number times H, plus the head.

        Returns:
            norm_RHT, [R, H, capacity] float32; undefined beyond a request's tokens.
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
        """Bring the sinks and the selected positions of some requests into a layer's packed segment.

        Args:
            segment: The layer's segment; it grows where it has less room.
            layer: Index of the layer.
            request_R: The refreshed requests, int32, each once; -1 where a row is of none.
            sink_R: Their sink tokens, int32.
            index_RHK: Their selected positions, int32, ascending, padded with -1 at the end.
            most_sink: The largest of `sink_R`, so that the device is not asked.
            heads_RH: Which KV heads' rows change, bool; None for all.

        Returns:
            What came from the host's tier; None for a store without one.
        """

    def ready(self, layer: int) -> None:
        """Wait, on the device, until what was packed for a layer is there."""

    def copy(self) -> "KVStore":
        """Return a store of its own with the same tokens."""

    def row(self, row: int) -> "KVStore":
        """Return one request's part as a store of batch 1 over the same memory; it must not grow."""
