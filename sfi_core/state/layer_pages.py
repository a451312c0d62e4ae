"""The pages of one layer: keys, values and the norms of the keys; and the table of all layers."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self, TypeVar

import torch

T = TypeVar("T")


class LayerTable(dict[int, T]):
    """What a store keeps, by layer; a layer that reads another's keys finds what the other one has.

    `owners` has the other layer of each such layer, which has no place of its own.
    """

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


def join_blocks(blocks: Iterable[tuple[int, torch.Tensor]], rows_1HTX: torch.Tensor, start: int) -> torch.Tensor:
    """Fill a request's rows from position `start` on with blocks, each given with its first position."""
    for first, block_1HNX in blocks:
        block_1HMX = block_1HNX[:, :, max(0, start - first) :]
        end = first + block_1HNX.shape[2] - start
        if end > 0:
            rows_1HTX[:, :, end - block_1HMX.shape[2] : end] = block_1HMX
    return rows_1HTX
