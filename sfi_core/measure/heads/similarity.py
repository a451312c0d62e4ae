"""Similarity of a layer's KV heads: the overlap of their top-k sets (SyncKV, Section 4.1)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

Matrix = npt.NDArray[np.float64]
PIECE = 16  # steps compared at once; a step takes a float for each head and cached token


def overlap(index_NHK: torch.Tensor) -> torch.Tensor:
    """Return the overlap coefficient of every two KV heads (SyncKV, Eq. 1).

    Args:
        index_NHK: For N steps the attended positions of each KV head, integers, padded with -1.

    Returns:
        [N, H, H] float64 in [0, 1]: the shared positions over those of the smaller set; 0 for an empty set.
    """
    N, H, _ = index_NHK.shape
    T = int(index_NHK.max()) + 1 if index_NHK.numel() else 0
    # padding goes to an extra column, which is cut off
    member_NHT = torch.zeros(N, H, T + 1, device=index_NHK.device)
    place_NHK = torch.where(index_NHK < 0, T, index_NHK).long()
    member_NHT = member_NHT.scatter_(2, place_NHK, 1.0)[..., :T]
    size_NH = member_NHT.sum(2)
    shared_NHH = member_NHT @ member_NHT.mT
    smaller_NHH = torch.minimum(size_NH[:, :, None], size_NH[:, None, :])
    return shared_NHH.double() / smaller_NHH.clamp_min(1).double()


@dataclass(frozen=True, slots=True)
class Similarity:
    """A layer's overlap coefficients, summed over `steps` steps."""

    total_HH: Matrix
    steps: int

    @classmethod
    def of(cls, index_NHK: torch.Tensor) -> Self:
        """Sum the overlaps of N steps; see `overlap`."""
        N, H, _ = index_NHK.shape
        total_HH = torch.zeros(H, H, dtype=torch.float64, device=index_NHK.device)
        for first in range(0, N, PIECE):
            total_HH += overlap(index_NHK[first : first + PIECE]).sum(0)
        return cls(total_HH.cpu().numpy(), N)

    @property
    def mean_HH(self) -> Matrix:
        """The similarity S of every two KV heads: the mean over steps and texts (SyncKV, Eq. 2)."""
        return self.total_HH / self.steps


def joined(parts: Iterable[Mapping[int, Similarity]]) -> dict[int, Similarity]:
    """Add similarities up by layer; all steps of all texts count the same."""
    found: dict[int, Similarity] = {}
    for part in parts:
        for layer, one in part.items():
            known = found.get(layer)
            found[layer] = one if known is None else Similarity(known.total_HH + one.total_HH, known.steps + one.steps)
    return found
