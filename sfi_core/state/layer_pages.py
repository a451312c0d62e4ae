"""The pages of one layer: keys, values and the norms of the keys."""

from dataclasses import dataclass

import torch


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
        """Bytes of one token's key and value over all heads."""
        _, H, _, D = self.key_PHND.shape
        return H * (D + self.value_PHNE.shape[3]) * self.key_PHND.itemsize
