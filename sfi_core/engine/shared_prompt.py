"""A prompt that is read once, by `read_prompt`, and decoded under many settings: its keys, values and queries."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.engine.batch_pass import PromptLayer
from sfi_core.errors import ConfigError
from sfi_core.state.kv_store import KVStore


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPrompt:
    """A batch of prompts after their dense pass.

    `count` are the tokens of each prompt, `ids_BT` the left-padded prompts, None for random keys and values. A request
    may reach `capacity` tokens. `store` has the full-attention layers, `layers` the input of their first selection,
    `others` what the host's windows and states hold. `window` of the prompt's last queries were kept; None for all. A
    run whose store is not `copied` overwrites the decoded tokens of the run before it.
    """

    count: Sequence[int]
    capacity: int
    store: KVStore
    layers: Mapping[int, PromptLayer]
    others: Mapping[str, Any] = field(default_factory=dict)
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
