"""A prompt that is read once, by `read_prompt`, and decoded under many settings: its keys, values and queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.engine.batch_pass import PromptLayer
from sfi_core.engine.layer import Layer
from sfi_core.engine.run import Run
from sfi_core.engine.select import end_prompt
from sfi_core.errors import ConfigError
from sfi_core.observers.events import PromptEvent
from sfi_core.policies.base import Policy
from sfi_core.state.kv_store import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompt:
    """A batch of prompts after their dense pass.

    `count` are the tokens of each prompt, `ids_BT` the left-padded prompts, None for random keys and values. A request
    may reach `capacity` tokens. `store` has the full-attention layers, `layers` the input of their first selection,
    `others` the host's windows and states. `window` of the prompt's last queries were kept; None for all. A run whose
    store is not `copied` overwrites the decoded tokens of the run before it.
    """

    count: Sequence[int]
    capacity: int
    store: KVStore
    layers: Mapping[int, PromptLayer]
    others: Mapping[int, Any] = field(default_factory=dict)
    logits_BV: torch.Tensor
    ids_BT: torch.Tensor | None = None
    window: int | None = None
    seconds: float = 0.0
    copied: bool = True

    def check(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, capacity: int) -> None:
        """Raise `ConfigError` for other prompts, or for more tokens than `capacity`."""
        read_BT, count = self.ids_BT, mask_BT.sum(1).tolist()
        same = read_BT is not None and ids_BT.shape == read_BT.shape and count == list(self.count)
        if read_BT is None or not same or not torch.equal(ids_BT * mask_BT, read_BT * mask_BT):
            raise ConfigError("shared must be of the same prompts, got others")
        if capacity > self.capacity:
            raise ConfigError(f"shared must be read with a capacity of {capacity} tokens, got {self.capacity}")

    def check_run(self, policy: Policy, backend: str, page_size: int | None) -> None:
        """Raise `ConfigError` if a policy needs queries that were not kept, or backend or tokens of a page differ."""
        needed, store, page_size = policy.config.window_prefill, self.store, page_size or self.capacity
        if self.window is not None and needed > self.window:
            raise ConfigError(f"window must keep {needed} queries of the prompt, got {self.window}")
        if (store.backend, store.page_size) != (backend, page_size):
            raise ConfigError(
                f"shared must be read with backend {backend} and pages of {page_size} tokens, "
                f"got {store.backend} and {store.page_size}"
            )

    def store_for_a_run(self) -> KVStore:
        """Return the store for a run to begin with."""
        return self.store.copy() if self.copied else self.store

    def begin(self, run: Run) -> None:
        """Start a run over `store_for_a_run` at the prompts' end: a first selection of its own, events."""
        run.meter.prefill_seconds = self.seconds
        for state in run.requests:
            state.tally.prefill_seconds = self.seconds
        if self.ids_BT is not None:
            requests = run.requests_of(range(len(self.count)))
            run.observer.on(PromptEvent(requests=requests, ids_BT=self.ids_BT, count=tuple(self.count)))
        run.begin_prefill(self.count, final=True)
        with run.observer.span("prefill"):
            for index, prompt in self.layers.items():
                run.layers.add(index)
                layer = Layer(run, index, **prompt.options)
                with run.launches():
                    end_prompt(layer, prompt.query_BHGTD)
                    run.tell(layer, prompt.query_BHGTD, prompt.query_BHGTD[..., :1])
