"""Watchers of a run's layers, and the one that keeps the last queries of the prompts."""

from collections.abc import Sequence
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
    """Keeps the last `window` queries of each prompt, by layer; None keeps all.

    Every run has one for its first selection; `read_prompt` adds another as a `Watcher`.
    """

    window: int | None
    layers: dict[int, PromptLayer] = field(default_factory=dict)

    def see(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Keep the queries of a piece of the prompt."""
        last_BHGTD = self.with_kept(layer, query_BHGTD)
        self.layers[layer.index] = PromptLayer(layer.options, last_BHGTD.clone())

    def with_kept(self, layer: SeenLayer, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """Return the prompts' last queries, those of the new piece included, padded on the left."""
        known, query = self.layers.get(layer.index), query_BHGTD
        if known is not None:
            query = _joined(known.query_BHGTD, query, layer.batch_pass.count)
        return query if self.window is None else query[:, :, :, -self.window :]


def _joined(old_BHGTD: torch.Tensor, new_BHGTD: torch.Tensor, count: Sequence[int]) -> torch.Tensor:
    T = new_BHGTD.shape[3]
    if all(tokens == T for tokens in count):
        return torch.cat([old_BHGTD, new_BHGTD], 3)
    # drop the padding between a request's old and new queries
    rows = [
        torch.cat([old, new[:, :, T - tokens :]], 2)
        for old, new, tokens in zip(old_BHGTD, new_BHGTD, count, strict=True)
    ]
    width = max(row.shape[2] for row in rows)
    return torch.stack([pad(row, (0, 0, width - row.shape[2], 0)) for row in rows])
