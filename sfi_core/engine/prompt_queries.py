"""The last queries of prompts that are read in pieces, by layer."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class PromptLayer:
    """What a full-attention layer's first selection needs.

    Attributes:
        options: The attention's scale, soft cap and sinks.
        query_BHGTD: The prompt's queries, or the last of them.
    """

    options: dict[str, Any]
    query_BHGTD: torch.Tensor


@dataclass(slots=True)
class PromptQueries:
    """Keeps the last `window` queries of the pieces of a prompt.

    Every run has one for its first selection; `read_prompt` adds another as a `Watcher`.

    Attributes:
        window: Queries kept, from the end; None for all, which H2O needs and which take as much memory as the
            keys of as many heads.
        layers: What has been kept, by layer.
    """

    window: int | None
    layers: dict[int, PromptLayer] = field(default_factory=dict)

    def see(self, layer: Any, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Keep the queries of a piece of the prompt."""
        kept = self.with_kept(layer.index, query_BHGTD)
        self.layers[layer.index] = PromptLayer(layer.options, kept.clone())

    def with_kept(self, layer: int, query_BHGTD: torch.Tensor) -> torch.Tensor:
        """Return the last queries of the prompt, a piece's own included."""
        known = self.layers.get(layer)
        query = query_BHGTD if known is None else torch.cat([known.query_BHGTD, query_BHGTD], 3)
        return query if self.window is None else query[:, :, :, -self.window :]

    def forget(self, request: int) -> None:
        """Keep nothing by request: a run reads its prompts once."""
