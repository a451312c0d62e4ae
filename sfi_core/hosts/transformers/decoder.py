"""A transformers model under a session, as `decode` drives it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.engine.graphs.recorder import Recorder, can_record, recorder_of
from sfi_core.engine.graphs.steps import GraphedSteps
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.hosts.transformers.session import Session
from sfi_kernels.step_descriptor import sent


def nothing_to_tell(read: int, total: int) -> None:
    """Ignore progress."""


@dataclass(slots=True)
class HostedModel:
    """A transformers model under a session, as `decode` drives it.

    Attributes:
        model: The model, inside `slow_fast`.
        session: Its session.
        ids_BT: Left-padded prompts.
        mask_BT: 1 where a token counts.
        capacity: Tokens a request may reach.
        stop_ids: Tokens that end a request.
        chunk: Prompt tokens of one forward pass; 0 for all at once.
        on_prefill: Told of the prompt tokens read so far and in all.
        shared: The prompts, read already or made up.
        cache: The run's cache.
        recorder: Records decoding steps; None where they run one by one.
    """

    model: Any
    session: Session
    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    capacity: int
    stop_ids: frozenset[int]
    chunk: int = 0
    on_prefill: Callable[[int, int], None] = nothing_to_tell
    shared: SharedPrompt | SyntheticPrompt | None = None
    cache: Any = None
    recorder: Recorder | None = None
    _graphed: GraphedSteps | None = None
    _options: dict[str, Any] = field(init=False)
    _ragged: bool = field(init=False)
    _wanted: bool = field(init=False)

    def __post_init__(self) -> None:
        """See what the model's forward pass takes."""
        self.recorder = recorder_of(self.session)
        self._wanted = can_record(self.model.device) and self.session.engine.graphs is not False
        self.cache = self.session.cache(self.capacity, self.ids_BT.shape[1], self.stop_ids)
        known = inspect.signature(self.model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._ragged = bool((self.mask_BT == 0).any())

    def prefill(self) -> torch.Tensor:
        """Read the prompt in pieces of `chunk` tokens."""
        if self.shared is not None:
            return self.shared.resume(self.session, self.cache)
        T = self.ids_BT.shape[1]
        logits = torch.empty(0)
        for start in range(0, T, self.chunk or T):
            stop = min(T, start + (self.chunk or T))
            logits = self._read(start, stop)
            self.on_prefill(stop, T)
        return logits

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request."""
        if self.recorder is not None:
            return self._replay(self.recorder, token_B)
        if self._wanted:
            self.session.run.paths["graph.eager"] += 1
        length_B = [state.length for state in self.session.run.requests]
        pair = sent(torch.tensor([token_B, length_B]), self.ids_BT.device)
        ids_B1, position_B1 = pair[0][:, None], pair[1][:, None]
        last, mask = self.cache.seen, None
        # of padding only sliding windows need to know: our own layers keep a request's tokens and no others
        if any(self.cache.is_sliding) and min(length_B) < last:
            place_T = torch.arange(last + 1, device=self.ids_BT.device)
            mask = place_T >= last - position_B1
        return self._forward(ids_B1, position_B1, mask)

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the step that decodes these tokens, which nobody has read yet, where that can be done."""
        if self._graphed is not None and self.cache.seen + 1 < self.capacity:
            self._graphed.ahead(token_B)

    def record(self, token_B: list[int]) -> None:
        """Note the tokens."""
        self.session.run.record(token_B)

    def admit(self, token_B: list[int]) -> list[int]:
        """Say whether to go on: there is nobody to admit."""
        return [] if self.session.run.done else token_B

    def _replay(self, recorder: Recorder, token_B: list[int]) -> torch.Tensor:
        if self._graphed is None:
            self._graphed = GraphedSteps(
                self.model, self.session, self.cache, recorder, self._options
            )
        logits_BV = self._graphed.step(token_B)
        if self._graphed.given_up:
            self.recorder = self._graphed = None
        return logits_BV

    def _read(self, start: int, stop: int) -> torch.Tensor:
        ids_BT, mask = self.ids_BT[:, start:stop], None
        if self._ragged:
            mask = self.mask_BT[:, :stop]
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start:]
        else:
            positions = torch.arange(start, stop, device=ids_BT.device).expand(len(ids_BT), -1)
        return self._forward(ids_BT, positions, mask)

    def _forward(
        self, ids_BT: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            **self._options,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits
