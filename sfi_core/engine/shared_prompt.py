"""A prompt that is read once and decoded from under many settings: its keys, values and queries.

Evaluation compares methods on one prompt, which every method reads densely. `read_prompt` does that once; a
run that begins with it makes its own first selection, and says what a run says that read the prompt itself.
"""

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.backend import layer_step
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.observers.events import PromptEvent
from sfi_core.state.kv_cache import KVCache

if TYPE_CHECKING:
    from sfi_core.engine.layer import LayerStep
    from sfi_core.hosts.transformers.session import Session


@dataclass(slots=True)
class PromptLayer:
    """What a full-attention layer's first selection needs.

    Attributes:
        options: The attention's scale, soft cap and sinks.
        query_BHGTD: The prompt's queries, or the last of them.
    """

    options: dict[str, Any]
    query_BHGTD: torch.Tensor


@dataclass(slots=True)
class SharedPrompt:
    """A batch of prompts after their dense pass.

    Attributes:
        ids_BT: The left-padded prompts.
        mask_BT: 1 where a token counts.
        capacity: Tokens that a run from here may reach.
        window: Queries kept, from the end; None for all, which H2O needs and which take as much memory as the
            keys of as many heads.
        layers: The full-attention layers.
        others: transformers' own layers, of sliding windows.
        cache: Their keys and values; a run gets a copy.
        logits_BV: The logits of the next token.
        seconds: What the pass took.
    """

    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    capacity: int
    window: int | None
    layers: dict[int, PromptLayer] = field(default_factory=dict)
    others: dict[int, Any] = field(default_factory=dict)
    cache: KVCache | None = None
    logits_BV: torch.Tensor | None = None
    seconds: float = 0.0

    def see(self, step: "LayerStep", query_BHGTD: torch.Tensor) -> None:
        """Keep the queries of a piece of the prompt."""
        known = self.layers.get(step.layer)
        query = query_BHGTD if known is None else torch.cat([known.query_BHGTD, query_BHGTD], 3)
        kept = query if self.window is None else query[:, :, :, -self.window :]
        self.layers[step.layer] = PromptLayer(step.options, kept.clone())

    def finish(self, run: Run, cache: SfiCache, logits_BV: torch.Tensor) -> None:
        """Keep what the pass left."""
        self.cache, self.logits_BV = run.cache, logits_BV
        self.others = {
            index: layer for index, layer in enumerate(cache.layers) if index not in self.layers
        }

    def check(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, capacity: int) -> None:
        """Refuse other prompts and longer runs.

        Raises:
            ConfigError: They are.
        """
        same = ids_BT.shape == self.ids_BT.shape and torch.equal(mask_BT, self.mask_BT)
        if not same or not torch.equal(ids_BT * mask_BT, self.ids_BT * self.mask_BT):
            raise ConfigError("shared must be of the same prompts, got others")
        if capacity > self.capacity:
            raise ConfigError(
                f"shared must be read with a capacity of {capacity} tokens, got {self.capacity}"
            )

    def resume(self, session: "Session", cache: SfiCache) -> torch.Tensor:
        """Begin a session's run with the prompts; return the logits of the next token, [B, V].

        Raises:
            ConfigError: The policy looks at queries that were not kept, or the pages are another backend's.
        """
        assert self.cache is not None, "the prompt has been read"
        assert self.logits_BV is not None, "the prompt has been read"
        B, T = self.ids_BT.shape
        run = session.start(cache, B, T)
        self._check_run(run)
        run.cache, run.prefill_seconds = self.cache.copy(), self.seconds
        for state in run.requests:
            state.prefill_seconds = self.seconds
        count = self.mask_BT.sum(1).tolist()
        run.observer.on_prompt(
            PromptEvent(requests=run.requests_of(range(B)), ids_BT=self.ids_BT, count=tuple(count))
        )
        run.begin_prefill(count, final=True)
        with run.observer.span("prefill"):
            for index, layer in self.layers.items():
                cache.layers[index].resume(T)
                run.layers.add(index)
                step = layer_step(run, index, **layer.options)
                with run.counted(index):
                    step.end_prefill(layer.query_BHGTD)
                    step.look(layer.query_BHGTD, layer.query_BHGTD[..., :1])
        for index, other in self.others.items():
            cache.layers[index] = copy.deepcopy(other)
        if run.signals is not None:
            run.signals.see_logits(self.logits_BV)
        cache.detach()
        return self.logits_BV

    def _check_run(self, run: Run) -> None:
        assert self.cache is not None, "the prompt has been read"
        needed = run.policy.config.window_prefill
        if self.window is not None and (run.policy.observes_prompt or needed > self.window):
            wanted = "all" if run.policy.observes_prompt else needed
            raise ConfigError(f"window must keep {wanted} queries of the prompt, got {self.window}")
        ours, theirs = self.cache, run.cache
        if (ours.backend, ours.page_size) != (theirs.backend, theirs.page_size):
            raise ConfigError(
                f"shared must be read with backend {theirs.backend} and pages of {theirs.page_size} "
                f"tokens, got {ours.backend} and {ours.page_size}"
            )
