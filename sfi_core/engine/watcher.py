"""What looks at every layer of a run."""

from typing import Any, Protocol

import torch


class Watcher(Protocol):
    """Looks at what every layer attended, and keeps a memory of its own."""

    def see(self, layer: Any, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Look at a layer, an `engine.layer.Layer`, that has attended with the pass's queries."""

    def forget(self, request: int) -> None:
        """Drop what is kept of a request that has left."""
