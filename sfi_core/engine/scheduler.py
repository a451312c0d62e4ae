"""Continuous batching: when a request ends, a waiting one takes its row of the batch."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch

from sfi_core.engine.derived_runs import open_row
from sfi_core.engine.left_pad import left_pad
from sfi_core.engine.picking.picker import Picker
from sfi_core.engine.run import Run
from sfi_core.state.request import RequestState


class Host(Protocol):
    """A model with a batch of prompts, as the scheduler needs it."""

    ids_BT: torch.Tensor

    @property
    def run(self) -> Run:
        """The run; there is none before `prefill`."""

    def prefill(self) -> torch.Tensor:
        """See `decode.Model`."""

    def step(self, token_B: list[int]) -> torch.Tensor:
        """See `decode.Model`."""

    def alone(self, ids_1T: torch.Tensor, mask_1T: torch.Tensor, run: Run) -> Self:
        """Return a host for one more prompt; its run has a row of this host's memory."""

    def seat(self, row: int, other: Self) -> None:
        """Put a prompt that was read alone into a row."""


@dataclass(slots=True)
class Scheduler:
    """Runs more prompts than the batch has rows, as the `Model` of `decode`.

    The first prompts are read together. When a request ends, the next prompt is read into its row, alone and
    whole, while the others wait; then all go on together.

    Attributes:
        decoder: The model with the first prompts.
        prompts: The token ids of all prompts.
        limits: The most new tokens of each prompt.
        pad_id: The input token of a row whose request has ended.
        on_token: Called with the new tokens, by prompt.
        nothing: The value passed to `on_token` for a prompt without a new token.
        waiting: The requests that have not begun.
    """

    decoder: Host
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    sampler: Picker
    pad_id: int
    on_token: Callable[[list[Any]], None] | None = None
    nothing: int | None = None
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        """Queue the prompts that have no row."""
        self.waiting = deque(range(len(self.decoder.ids_BT), len(self.prompts)))

    def prefill(self) -> torch.Tensor:
        """See `decode.Model`."""
        return self.decoder.prefill()

    def step(self, token_B: list[int]) -> torch.Tensor:
        """See `decode.Model`."""
        return self.decoder.step(token_B)

    def sample(self, logits_BV: torch.Tensor) -> list[int]:
        """Pick a token for every row."""
        return self._sample(self.sampler, self.decoder.run, logits_BV)

    def record(self, token_B: list[int]) -> None:
        """See `decode.Model`."""
        self._record(self.decoder.run, token_B)

    def admit(self, token_B: list[int]) -> list[int]:
        """See `decode.Model`; a request that ends with its first token gives its row to the next."""
        run, token_B = self.decoder.run, list(token_B)
        for row in range(len(token_B)):
            while self.waiting and run.requests[row].finished:
                token_B[row] = self._begin(row, self.waiting.popleft())
        return [] if run.done else token_B

    def take(self, given: Sequence[Sequence[int]]) -> None:
        """Note each row's new tokens of a lossless run's pass: any number, or none."""
        self.sampler.advance(given)
        states = self.decoder.run.requests
        for place in range(max(map(len, given))):
            told = {
                state.request: tokens[place]
                for state, tokens in zip(states, given, strict=True)
                if len(tokens) > place
            }
            self._tell(told)

    def _tell(self, told: dict[int, int]) -> None:
        if self.on_token is not None:
            self.on_token([told.get(request, self.nothing) for request in range(len(self.prompts))])

    def _begin(self, row: int, request: int) -> int:
        # read the request's prompt into the row, and return its first token
        run, prompt = self.decoder.run, self.prompts[request]
        alone = open_row(run, row, RequestState(request=request, prompt_tokens=len(prompt)))
        ids_1T, mask_1T = left_pad([prompt], self.decoder.ids_BT.device)
        decoder = self.decoder.alone(ids_1T, mask_1T, alone)
        sampler = self.sampler.alone(ids_1T, request)
        tokens = self._sample(sampler, alone, decoder.prefill())
        self._record(alone, tokens)
        run.step = alone.step
        self.decoder.seat(row, decoder)
        self.sampler.seat(row, sampler)
        return tokens[0]

    def _sample(self, sampler: Picker, run: Run, logits_BV: torch.Tensor) -> list[int]:
        with run.observer.span("sample"):
            return sampler(logits_BV, [state.finished for state in run.requests], self.pad_id)

    def _record(self, run: Run, token_B: list[int]) -> None:
        run.record(token_B)
        for state in run.requests:
            state.finished |= len(state.tokens) >= self.limits[state.request]
        self._tell({state.request: x for state, x in zip(run.requests, token_B, strict=True)})
