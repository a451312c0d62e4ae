"""What a store keeps of a layer: pages of keys, values and the norms of the keys; the packed segment (Sec. 4.2)."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self, TypeVar

import torch

T = TypeVar("T")


class LayerTable(dict[int, T]):
    """What a store keeps, by layer; a layer that reads another's keys, its owner's, finds what the owner has."""

    def __init__(self, contents: Iterable[tuple[int, T]] = (), owners: dict[int, int] | None = None) -> None:
        """Begin with what is kept already."""
        super().__init__(contents)
        self.owners = {} if owners is None else owners

    def __missing__(self, layer: int) -> T:
        """Return what the layer's owner has."""
        return self[self.owners[layer]]

    def like(self, contents: Iterable[tuple[int, T]]) -> Self:
        """Return a table of the same layers with other contents."""
        return type(self)(contents, self.owners)


@dataclass(slots=True)
class LayerPages:
    """One layer's pages."""

    key_PHND: torch.Tensor
    value_PHNE: torch.Tensor
    norm_PHN: torch.Tensor

    @classmethod
    def empty(cls, key: torch.Tensor, value: torch.Tensor, pages: int, page_size: int) -> Self:
        """Allocate pages for keys [B, H, T, D] and values [B, H, T, E] such as these."""
        shape = pages, key.shape[1], page_size
        norm_PHN = key.new_empty(shape, dtype=torch.float32)
        return cls(key.new_empty(*shape, key.shape[3]), value.new_empty(*shape, value.shape[3]), norm_PHN)

    def part(self, pages: slice) -> "LayerPages":
        """Return some of the pages, over the same memory."""
        return LayerPages(*(tensor[pages] for tensor in self.tensors))

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and norms."""
        return self.key_PHND, self.value_PHNE, self.norm_PHN

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values of all heads."""
        _, H, _, D = self.key_PHND.shape
        return H * (D + self.value_PHNE.shape[3]) * self.key_PHND.itemsize


def tokens_of(page_PHNX: torch.Tensor, table_P: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Copy a request's rows `start` to `stop` - 1 out of its pages, [1, H, T, X], without a sync."""
    N = page_PHNX.shape[2]
    first = start // N
    page_P = table_P[first : -(-stop // N)].long()
    rows_HTX = page_PHNX[page_P].transpose(0, 1).flatten(1, 2)
    return rows_HTX[None, :, start - first * N : stop - first * N]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer's keys and values; `window` is None for full attention, `query_heads` 0 if not needed.

    `state_bytes` are those of a request's states that do not grow: of linear attention, of a convolution. A layer
    of states alone has a window of 0 tokens. `owner` is the layer whose keys and values this one reads; None if it
    has its own.
    """

    heads: int
    key_width: int
    value_width: int
    itemsize: int
    window: int | None = None
    query_heads: int = field(default=0, compare=False)
    state_bytes: int = 0
    owner: int | None = None

    @property
    def hosted(self) -> bool:
        """Whether the host keeps something of its own for the layer: a window or states."""
        return self.window is not None or self.state_bytes > 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of one token's keys and values in memory: none where another layer has them."""
        return 0 if self.owner is not None else self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values of all heads."""
        return self.heads * (self.key_width + self.value_width) * self.itemsize


class PackedSegment:
    """One layer's packed rows, contiguous, for every request: the sinks, then the selected, ascending.

    Only the first `length_BH` rows are read; `position_BHS` are their positions, padded with -1. Both are int32.
    """

    def __init__(
        self, batch: int, rows: int, key_PHND: torch.Tensor, value_PHNE: torch.Tensor, *, packs: bool = True
    ) -> None:
        """Allocate `rows` rows for each request of a batch; without `packs` positions alone, for attention in pages.

        The pages give heads, widths, dtype and device.
        """
        H, device = key_PHND.shape[1], key_PHND.device
        self.key_BHSD, self.value_BHSE = (
            pages.new_empty(batch, H, rows if packs else 0, pages.shape[3]) for pages in (key_PHND, value_PHNE)
        )
        self.position_BHS = torch.full((batch, H, rows), -1, dtype=torch.int32, device=device)
        self.length_BH = torch.zeros(batch, H, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values, positions and lengths."""
        return self.key_BHSD, self.value_BHSE, self.position_BHS, self.length_BH

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def row(self, row: int) -> "PackedSegment":
        """Empty one request's rows and return them as a segment of batch 1 over the same memory."""
        segment = copy.copy(self)
        for name in ("key_BHSD", "value_BHSE", "position_BHS", "length_BH"):
            setattr(segment, name, getattr(self, name)[row : row + 1])
        segment.position_BHS.fill_(-1)
        segment.length_BH.zero_()
        return segment

    def reserve(self, rows: int) -> None:
        """Grow to at least `rows` rows for every request, by copying."""
        B, H, old = self.position_BHS.shape
        if rows <= old:
            return
        for name in ("key_BHSD", "value_BHSE", "position_BHS"):
            small = getattr(self, name)
            if small.shape[2] < old:  # it has no packed rows
                continue
            large = small.new_empty(B, H, rows, *small.shape[3:])
            large[:, :, :old] = small
            setattr(self, name, large)
        self.position_BHS[:, :, old:] = -1
