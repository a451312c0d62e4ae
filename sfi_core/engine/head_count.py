"""How many KV heads of a step read everything, where a policy mixes heads within a layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class HeadCount:
    """Counts on the device; read once a step, when the host has waited for the step's tokens anyway."""

    _share: dict[int, torch.Tensor] = field(default_factory=dict)

    def add(self, rows: Sequence[int], dense_RH: torch.Tensor) -> None:
        """Count a layer: which heads of some rows of the batch read everything."""
        for row, share in zip(rows, dense_RH.float().mean(1).unbind(), strict=True):
            self._share[row] = self._share[row] + share if row in self._share else share

    def settle(self) -> dict[int, float]:
        """Return the layers' worth of heads that read everything, by row; starts anew."""
        if not self._share:
            return {}
        counted, self._share = self._share, {}
        layers = torch.stack(list(counted.values())).tolist()
        return dict(zip(counted, layers, strict=True))
