"""Slots: the rows of a batch, which requests that wait take when others end (continuous batching)."""

import time
from collections import deque
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sfi_core.engine.run import Run
from sfi_core.generation.prompts import left_pad
from sfi_core.generation.sampling import Sampler
from sfi_core.hosts.transformers.decoder import HostedModel, nothing_to_tell
from sfi_core.state.request import SparseState


@dataclass(slots=True)
class Slots:
    """A model with more prompts than rows, as `decode` drives it.

    The first prompts are read together. When a request ends, the next prompt is read into its row, alone and
    whole, while the others wait; then all go on together.

    Attributes:
        hosted: The model with the first prompts.
        prompts: The token ids of all.
        limits: The most new tokens of each.
        sampler: Picks the tokens.
        pad_id: Stands for a request that has no new token.
        on_token: Told the new tokens, by request; padding where there is none.
        waiting: The requests that have not begun.
    """

    hosted: HostedModel
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    sampler: Sampler
    pad_id: int
    on_token: Callable[[list[int]], None] | None = None
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        """Queue what has no row, in order."""
        self.waiting = deque(range(len(self.hosted.ids_BT), len(self.prompts)))

    def prefill(self) -> torch.Tensor:
        """See `decode.Model`."""
        return self.hosted.prefill()

    def step(self, token_B: list[int]) -> torch.Tensor:
        """See `decode.Model`."""
        return self.hosted.step(token_B)

    def sample(self, logits_BV: torch.Tensor) -> list[int]:
        """Pick a token for every row."""
        return self._sample(self.sampler, self.hosted.session.run, logits_BV)

    def record(self, token_B: list[int]) -> None:
        """See `decode.Model`."""
        self._record(self.hosted.session.run, token_B)

    def admit(self, token_B: list[int]) -> list[int]:
        """See `decode.Model`; a request may end with its first token and leave the row to yet another."""
        run, token_B = self.hosted.session.run, list(token_B)
        for row in range(len(token_B)):
            while self.waiting and run.requests[row].finished:
                token_B[row] = self._begin(row, self.waiting.popleft())
        return [] if run.done else token_B

    def _begin(self, row: int, request: int) -> int:
        # read the request's prompt into the row, and return its first token
        run, prompt = self.hosted.session.run, self.prompts[request]
        alone = open_slot(run, row, SparseState(request=request, prompt_tokens=len(prompt)))
        ids_1T, mask_1T = left_pad([prompt], self.hosted.ids_BT.device)
        hosted = replace(
            self.hosted, ids_BT=ids_1T, mask_BT=mask_1T, on_prefill=nothing_to_tell, shared=None
        )
        hosted.cache.attach(alone)
        sampler = self.sampler.alone(ids_1T, request)
        tokens = self._sample(sampler, alone, hosted.prefill())
        self._record(alone, tokens)
        take_slot(run, row, alone)
        self.hosted.cache.seat(row, hosted.cache, max(state.length for state in run.requests))
        self.sampler.seat(row, sampler)
        return tokens[0]

    def _sample(self, sampler: Sampler, run: Run, logits_BV: torch.Tensor) -> list[int]:
        with run.observer.span("sample"):
            return sampler(logits_BV, [state.finished for state in run.requests], self.pad_id)

    def _record(self, run: Run, token_B: list[int]) -> None:
        run.record(token_B)
        for state in run.requests:
            state.finished |= len(state.tokens) >= self.limits[state.request]
        if self.on_token is not None:
            told = {state.request: x for state, x in zip(run.requests, token_B, strict=True)}
            self.on_token([told.get(request, self.pad_id) for request in range(len(self.prompts))])


def open_slot(run: Run, row: int, state: SparseState) -> Run:
    """Give the row of a request that has ended to another one.

    Returns:
        A run of that one alone, over the row's part of the memory, for reading its prompt.
    """
    if run.signals is not None:
        run.signals.settle(run.requests)  # while the row is still the old request's
    ended = run.requests[row]
    run.left.append(ended)
    _forget(run.notes, ended.request)
    if run.audit is not None:
        _forget(run.audit.queries, ended.request)
    state.queued_seconds = time.perf_counter() - run.born
    run.requests[row] = state
    # one prompt: nothing to overlap with, and no step to replay
    engine = replace(run.engine, overlap=False, graphs=False)
    pages = run.cache.slot(row)
    alone = Run(run.policy, run.observer, pages, run.stop_ids, run.device, run.audit, engine,
                run.ranks)  # fmt: skip
    packed = run.layers.difference(run.policy.config.dense_layers)
    alone.segments = {layer: run.segment(layer).slot(row) for layer in packed}
    alone.requests, alone.step, alone.layers = [state], run.step, run.layers
    alone.paths, alone.kernels, alone.notes = run.paths, run.kernels, run.notes
    return alone


def take_slot(run: Run, row: int, alone: Run) -> None:
    """Go on with a request whose prompt was read by `open_slot`'s run."""
    run.step = alone.step
    run.prefill_seconds += alone.prefill_seconds
    if run.signals is not None and alone.signals is not None:
        alone.signals.settle(alone.requests)
        run.signals.seat(row, alone.signals)


def _forget(kept: MutableMapping[tuple[int, int], Any], request: int) -> None:
    for key in [key for key in kept if key[0] == request]:
        del kept[key]
