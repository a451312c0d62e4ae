"""Watchers of a run's layers, and the one that keeps the last queries of the prompts."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from sfi_core.engine.batch_pass import BatchPass


class SeenLayer(Protocol):
    """An `engine.layer.Layer`, as far as a run knows it."""

    index: int
    options: dict[str, Any]
    batch_pass: BatchPass


class Watcher(Protocol):
    """Sees the queries and outputs of every layer, and may keep data of its own."""

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Look at the pass's queries and outputs of a layer."""

    def forget(self, request: int) -> None:
        """Drop the data of a request that has left; by default there are none by request."""
        del request


@dataclass(frozen=True, slots=True)
class PromptLayer:
    """The input of a layer's first selection: the prompt's last queries, and scale, soft cap and sinks."""

    options: dict[str, Any]
    query_BHGTD: torch.Tensor


@dataclass(slots=True)
class PromptQueries(Watcher):
    """Keeps the last `window` queries of each prompt, by layer, for the first selection; None keeps all."""

    window: int | None
    layers: dict[int, PromptLayer] = field(default_factory=dict)

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Keep the queries of a piece of the prompt."""
        self.layers[layer.index] = PromptLayer(layer.options, self.with_kept(layer, query_BHGTD).clone())

    def with_kept(self, layer: SeenLayer, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """Return the prompts' last queries, those of the new piece included, padded on the left."""
        query, T, count = query_BHGTD, query_BHGTD.shape[3], layer.batch_pass.count
        before = self.layers.get(layer.index)
        if before is not None and all(tokens == T for tokens in count):
            query = torch.cat([before.query_BHGTD, query], 3)
        elif before is not None:  # drop the padding between a request's old and new queries
            pairs = zip(before.query_BHGTD, query, count, strict=True)
            rows = [torch.cat([old, new[:, :, T - tokens :]], 2) for old, new, tokens in pairs]
            width = max(row.shape[2] for row in rows)
            query = torch.stack([pad(row, (0, 0, width - row.shape[2], 0)) for row in rows])
        return query if self.window is None else query[:, :, :, -self.window :]
