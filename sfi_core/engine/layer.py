"""One layer of the forward pass under way, as backends, policies and watchers see it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sfi_core.engine.run import Run


class Layer:
    """A view of a run's layer; it owns nothing.

    Attributes:
        run: The run; its store holds the layer's new keys and values already.
        index: Index of the transformer layer.
        forward: The pass under way.
        backend: Whose ops run: "torch" or "triton".
        pages: The layer's keys and values.
        left_dense: Whether the layer is dense at every step.
        logit_options: Scale and soft cap of the logits, as the ops take them.
        options: The same, and the learned sink logits.
        dense_heads: Which KV heads read everything, [H] bool, by row, where a policy mixes heads in a step.
        later: What is selected once all that watch have seen what the layer attended.
    """

    def __init__(
        self,
        run: Run,
        index: int,
        *,
        scale: float,
        soft_cap: float | None = None,
        sink_HG: torch.Tensor | None = None,
    ) -> None:
        """Look at a layer of a run.

        Args:
            run: The run, within a forward pass.
            index: Index of the transformer layer.
            scale: Factor on the logits.
            soft_cap: Soft cap of the logits; None for none.
            sink_HG: Learned sink logits; None for none.
        """
        self.run, self.index, self.forward = run, index, run.forward
        self.backend = run.store.backend
        self.pages = run.store.pages(index)
        self.left_dense = index in run.policy.config.dense_layers
        self.logit_options: dict[str, Any] = {"scale": scale, "soft_cap": soft_cap}
        self.options: dict[str, Any] = {**self.logit_options, "sink_HG": sink_HG}
        self.dense_heads: dict[int, torch.Tensor] = {}
        self.later: list[Callable[[], None]] = []

    def finish(self, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Show all that watch what the layer attended, then select what comes after it."""
        self.run.tell(self, query_BHGTD, out_BHGTE)
        for select in self.later:
            select()

    def moved_bytes(self, rows: Sequence[int], *, dense: bool) -> int:
        """Return the bytes of keys and values that some requests' attention reads."""
        states = [self.run.requests[row] for row in rows]
        tokens = sum(state.length if dense else state.fast_tokens for state in states)
        return tokens * self.pages.row_bytes
