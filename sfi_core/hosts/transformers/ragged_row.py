"""The new tokens of several requests in one row, one request after another, without padding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from sfi_kernels.step_descriptor import sent


@dataclass(frozen=True, slots=True)
class RaggedRow:
    """The mapping between a row of X tokens and the padded batch [B, T] of an attention layer.

    `place_BT` are the places in the row of each request's tokens, the last of T, 0 for padding; `place_X`
    those of the row's tokens in the flattened batch.
    """

    place_BT: torch.Tensor
    place_X: torch.Tensor

    @classmethod
    def of(cls, count: Sequence[int], device: torch.device) -> Self:
        """Lay out `count` tokens of each request."""
        T, begin = max(count), 0
        place_BT: list[list[int]] = []
        place_X: list[int] = []
        for row, own in enumerate(count):
            place_BT.append([0] * (T - own) + list(range(begin, begin + own)))
            place_X += range(row * T + T - own, (row + 1) * T)
            begin += own
        return cls(sent(torch.tensor(place_BT), device), sent(torch.tensor(place_X), device))

    def spread(self, row_1HXD: torch.Tensor) -> torch.Tensor:
        """Return a row of queries, keys or values as a padded batch, [B, H, T, D]."""
        B, T = self.place_BT.shape
        flat_HYD = row_1HXD[0].index_select(1, self.place_BT.flatten())
        return flat_HYD.view(len(flat_HYD), B, T, -1).transpose(0, 1)

    def join(self, out_BHGTE: torch.Tensor) -> torch.Tensor:
        """Return a padded batch of outputs as a row, [1, H, G, X, E]."""
        flat_HGYE = out_BHGTE.permute(1, 2, 0, 3, 4).flatten(2, 3)
        return flat_HGYE.index_select(2, self.place_X)[None]
