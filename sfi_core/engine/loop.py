"""The decoding loop, Algorithm 1; when a request ends, a waiting one takes its row of the batch."""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch

from sfi_core.engine.lossless import Block, DraftRule, Drafts, Outcome
from sfi_core.engine.picking import Picker
from sfi_core.engine.run import Run
from sfi_core.state.request import RequestState
from sfi_kernels.compiled import clock

NewTokens = dict[int, list[int]]  # by request; a request without a new token is missing


class Drafting(Protocol):
    """Runs the passes of a lossless run."""

    @property
    def chains(self) -> bool:
        """Whether the next pass can take tokens from the device, by `Drafts.unread_N`."""

    def __call__(self, drafts: Drafts) -> torch.Tensor:
        """Run a pass; return the logits of all tokens of all blocks, [X, V]."""

    def keep(self, blocks: Sequence[Block | None], given: Sequence[Sequence[int]]) -> None:
        """Remove the rejected tokens from caches that the engine does not own."""


class Host(Protocol):
    """A model with a batch of prompts, as the loop needs it."""

    ids_BT: torch.Tensor

    @property
    def run(self) -> Run:
        """The run; there is none before `prefill`."""

    def prefill(self) -> torch.Tensor:
        """Read the prompts: step 0, which is slow (g_0 = 1). Return the next tokens' logits, [B, V]."""

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode x_{t-1} in a slow or a fast step, as the policy plans; return logits, [B, V]."""

    def alone(self, ids_1T: torch.Tensor, mask_1T: torch.Tensor, run: Run) -> Self:
        """Return a host for one more prompt; its run has a row of this host's memory."""

    def seat(self, row: int, other: Self) -> None:
        """Put a prompt that was read alone into a row."""

    def draft_rule(self) -> DraftRule:
        """Return what ends a draft in a lossless run."""

    def drafting(self) -> Drafting:
        """Return the passes of a lossless run."""


@dataclass(slots=True)
class Loop:
    """Decodes prompts, more than the batch has rows if need be; `limits` are the most new tokens of each.

    The first prompts are read together. When a request ends, the next of those `waiting` is read into its row, alone
    and whole, while the others wait; then all go on together.
    """

    host: Host
    prompts: Sequence[Sequence[int]]
    limits: Sequence[int]
    sampler: Picker
    waiting: deque[int] = field(init=False)

    def __post_init__(self) -> None:
        """Queue the prompts that have no row."""
        self.waiting = deque(range(len(self.host.ids_BT), len(self.prompts)))

    def decode(self) -> Generator[NewTokens]:
        """Yield the new tokens of each pass, alternating fast and slow steps (Algorithm 1)."""
        token_B = yield from self._first()
        run = self.host.run
        while token_B := (yield from self._admit(token_B)):
            token_B = yield from self._give(run, self.sampler, self.host.step(token_B))

    def decode_lossless(self, outcome: Outcome | None = None) -> Generator[NewTokens]:
        """Yield full attention's tokens of each pass: none where a request drafts, one or more where it verifies."""
        token_B = yield from self._first()
        host, sampler = self.host, self.sampler
        drafts = Drafts(host.run, host.draft_rule(), self.limits, sampler.read, outcome)
        drafting, requests = host.drafting(), host.run.requests
        try:
            while (yield from self._admit(token_B)):
                logits_XV = drafting(drafts)
                host.run.count_selected()
                picks = sampler.draw(logits_XV, *drafts.positions())
                given = drafts.record(picks, logits_XV, chained=drafting.chains and not sampler.looks_back)
                drafting.keep(drafts.blocks, given)
                sampler.advance(given)
                token_B = [state.tokens[-1] for state in requests]
                yield {state.request: new for state, new in zip(requests, given, strict=True) if new}
        finally:
            drafts.drop()

    def _first(self) -> Generator[NewTokens, None, list[int]]:
        logits_BV = self.host.prefill()  # makes the run
        return (yield from self._give(self.host.run, self.sampler, logits_BV))

    def _give(self, run: Run, sampler: Picker, logits_BV: torch.Tensor) -> Generator[NewTokens, None, list[int]]:
        # pick and note a token of every request that goes on, yield them, and return all rows' tokens
        finished_B = [state.finished for state in run.requests]
        run.count_selected()
        with run.observer.span("sample"):
            token_B = sampler(logits_BV, finished_B)
        run.record(token_B)
        for state in run.requests:
            state.finished |= len(state.tokens) >= self.limits[state.request]
        rows = zip(run.requests, token_B, finished_B, strict=True)
        yield {state.request: [token] for state, token, finished in rows if not finished}
        return token_B

    def _admit(self, token_B: list[int]) -> Generator[NewTokens, None, list[int]]:
        # begin waiting requests in free rows; return all rows' tokens, [] once all requests have ended
        run, token_B = self.host.run, list(token_B)
        for row in range(len(token_B)):
            while self.waiting and run.requests[row].finished:
                token_B[row] = yield from self._begin(row, self.waiting.popleft())
        return [] if all(state.finished for state in run.requests) else token_B

    def _begin(self, row: int, request: int) -> Generator[NewTokens, None, int]:
        # read a request's prompt into the row, yield and return its first token
        run, prompt = self.host.run, self.prompts[request]
        alone = open_row(run, row, RequestState(request=request, prompt_tokens=len(prompt)))
        ids_1T, mask_1T = left_pad([prompt], self.host.ids_BT.device)
        host, sampler = self.host.alone(ids_1T, mask_1T, alone), self.sampler.alone(ids_1T, request)
        (token,) = yield from self._give(alone, sampler, host.prefill())
        run.step = alone.step
        self.host.seat(row, host)
        self.sampler.seat(row, sampler)
        return token


def open_row(run: Run, row: int, state: RequestState) -> Run:
    """Give the row of an ended request to another; return a run of that alone, over the memory."""
    run.left.append(forget(run, row))
    state.tally.queued_seconds = clock() - run.meter.born
    run.requests[row] = state
    for kept in run.kept.values():
        kept.rewind(row, 0)
    only, packed = slice(row, row + 1), run.layers.difference(run.policy.config.dense_layers)
    alone = replace(
        run,
        store=run.store.row(row),
        engine=replace(run.engine, overlap=False, graphs=False),  # one prompt: no step to replay
        attend=None,
        left=[],
        segments={layer: run.segment(layer).row(row) for layer in packed},
        kept={layer: kept.of(only) for layer, kept in run.kept.items()},
        recorded=True,
        _batch_pass=None,
    )
    alone.requests = [state]
    return alone


def forget(run: Run, row: int) -> RequestState:
    """Drop the notes of policy and watchers on a row's request; return the request's state."""
    ended = run.requests[row]
    for key in [key for key in run.notes if key[0] == ended.request]:
        del run.notes[key]
    for watcher in run.watchers:
        watcher.forget(ended.request)
    return ended


def left_pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad on the left with a row's first token, which no repetition penalty minds; return ids and mask, [B, T]."""
    width = max(map(len, rows))
    ids = torch.tensor([[row[0]] * (width - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
