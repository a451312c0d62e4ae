"""The interface of objects that look at every layer of a run."""

from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Sees the queries and outputs of every layer, and may keep data of its own."""

    def see(self, layer: Any, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Look at the pass's queries and outputs of an `engine.layer.Layer`."""

    def forget(self, request: int) -> None:
        """Drop the data of a request that has left."""
