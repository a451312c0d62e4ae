"""A transformers model under a session, as `engine.loop` drives it: one batch of prompts."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from sfi_core.engine.lossless import Cost, DraftRule
from sfi_core.engine.prompt_cache import PromptCache
from sfi_core.engine.prompt_queries import Watcher
from sfi_core.engine.run import Run
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.hosts.transformers.block_pass import BlockPass
from sfi_core.hosts.transformers.cache import SfiCache, SfiLayer
from sfi_core.hosts.transformers.known_prompt import KnownPrompt
from sfi_core.hosts.transformers.lossless import most_drafted
from sfi_core.hosts.transformers.own_layers import take_states
from sfi_core.hosts.transformers.replays import ModelPass, Replays
from sfi_core.hosts.transformers.session import Session
from sfi_core.models.describe import describe_model
from sfi_core.sizes.step import ByteModel
from sfi_core.state.kv_store import KVStore
from sfi_kernels.step_descriptor import sent


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A transformers model under a session, as `engine.loop` drives it.

    The prompts are `ids_BT`, padded on the left, with 1 in `mask_BT` where a token counts; `shared` are
    prompts that were read already, or made up. A request may reach `capacity` tokens, generates at most
    `generated` (None for what `capacity` leaves), and ends with one of `stop_ids`. A forward pass reads
    `chunk` prompt tokens, 0 for all; `on_prefill` is then told of those read so far and in all. `requests`
    counts those that wait for a row too; None for those of the batch. The `watchers` look at every layer. Prompts go
    on behind what they share with the prompt of `known`; the run's one prompt is then left there. `replays` are the
    steps that run as CUDA graphs; `patient` as there.
    """

    session: Session
    ids_BT: torch.Tensor
    mask_BT: torch.Tensor
    capacity: int
    stop_ids: frozenset[int] = frozenset()
    chunk: int = 0
    requests: int | None = None
    generated: int | None = None
    shared: SharedPrompt | None = None
    watchers: tuple[Watcher, ...] = ()
    known: PromptCache | None = None
    on_prefill: Callable[[int, int], None] | None = None
    patient: bool = True
    cache: SfiCache = field(init=False)
    replays: Replays = field(init=False)
    _model: ModelPass = field(init=False)
    _ragged: bool = field(init=False)

    def __post_init__(self) -> None:
        """Check whether steps can be recorded, and what the model's forward pass takes."""
        session = self.session
        self.cache = session.cache(self.capacity, self.ids_BT.shape[1], self.stop_ids)
        self.cache.requests, self.cache.generated, self.cache.known = self.requests, self.generated, self.known
        self._model = ModelPass(session, self.cache, len(self.ids_BT))
        self.replays = Replays(session, self.cache, self._model, patient=self.patient)
        self._ragged = bool((self.mask_BT == 0).any())

    @property
    def run(self) -> Run:
        """The run, once the prompt is being read."""
        return self.session.run

    def prefill(self) -> torch.Tensor:
        """Read the prompt in pieces of `chunk` tokens; return the next token's logits, [B, V]."""
        if self.shared is not None:
            return self._begin_with(self.shared)
        B, T = self.ids_BT.shape
        if self.cache.run is None:
            self.session.start(self.cache, B, T, watchers=self.watchers)
        logits, known, size = torch.empty(0), self._known(), self.chunk or T
        start = 0 if known is None else known.begin(self.ids_BT)
        stops = [*range(start + size, T, size), T]
        for stop in stops if known is None else known.stops(stops):
            logits, start = self._read(start, stop), stop
            if known is not None:
                known.see(stop)
            if self.on_prefill is not None:
                self.on_prefill(stop, T)
        if known is not None:
            known.leave()
        return logits

    def _known(self) -> KnownPrompt | None:
        if self.known is None:
            return None
        prompts = [ids[mask != 0].tolist() for ids, mask in zip(self.ids_BT, self.mask_BT, strict=True)]
        return KnownPrompt(self.known, self.session, self.cache, prompts, leaves=self.requests == 1)

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request."""
        run = self.session.run
        with self.replays.next_step(run, sum(not state.finished for state in run.requests)) as replayed:
            if replayed:
                run.begin_decode()
                return self.replays.replay(run, [[token] for token in token_B])
            return self._step(run, token_B)

    def _step(self, run: Run, token_B: list[int]) -> torch.Tensor:
        # one kernel after the other, watched by all that watch
        length_B = [state.length for state in run.requests]
        pair = sent(torch.tensor([token_B, length_B]), self.ids_BT.device)
        ids_B1, position_B1 = pair[0][:, None], pair[1][:, None]
        last, mask = self.cache.seen, None
        # only sliding windows need to know of padding: our own layers keep a request's tokens and no others
        if any(self.cache.is_sliding) and min(length_B) < last:
            place_T = torch.arange(last + 1, device=self.ids_BT.device)
            mask = place_T >= last - position_B1
        return self._forward(ids_B1, position_B1, mask)

    def draft_rule(self) -> DraftRule:
        """Return what ends a draft in a lossless run."""
        session, policy = self.session, self.session.policy
        draft = policy.config.draft
        return DraftRule(
            config=replace(draft, max_tokens=most_drafted(session.shapes(), draft.max_tokens)),
            stop_ids=self.run.stop_ids, cost=_draft_cost(session), selecting=policy.selection_tokens,
        )  # fmt: skip

    def drafting(self) -> BlockPass:
        """Return the passes of a lossless run."""
        return BlockPass(self.run, self.cache, self.replays, self.planned_pass)

    def planned_pass(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, run: Run | None = None) -> torch.Tensor:
        """Run a pass that the engine has begun; return the logits of every token, [B, T, V].

        A twin `run` takes the session's place.
        """
        run = run or self.session.run
        self.cache.attach(run)
        with run.observer.span("forward"), run.launches(), self.cache.planning():
            logits = self._model(ids_BT, positions_BT, None, last=False)
        run.maintenance.join()
        return logits

    def alone(self, ids_1T: torch.Tensor, mask_1T: torch.Tensor, run: Run) -> Self:
        """Return a decoder that reads one more prompt into a row with a run of its own."""
        alone = type(self)(
            session=self.session, ids_BT=ids_1T, mask_BT=mask_1T, capacity=self.capacity,
            stop_ids=self.stop_ids, chunk=self.chunk, requests=self.requests, known=self.known,
        )  # fmt: skip
        alone.cache.attach(run)
        return alone

    def seat(self, row: int, other: Self) -> None:
        """Give a row to a prompt that was read alone."""
        lengths = [state.length for state in self.run.requests]
        self.session.state_checks.positions(lengths)
        self.cache.seat(row, other.cache, max(lengths))

    def _begin_with(self, shared: SharedPrompt) -> torch.Tensor:
        session, cache = self.session, self.cache
        if session.tiers is not None and shared.store.whole_on_device:
            count = shared.count
            store = session.store(len(count), shared.capacity, shared.capacity - max(count))
            shared = _on_two_tiers(shared, store)
        shared.check_run(session.policy, session.backend, session.page_size)
        run = session.start(cache, *self.ids_BT.shape, watchers=self.watchers, store=shared.store_for_a_run())
        shared.begin(run)
        for layer in cache.managed:
            layer.resume(self.ids_BT.shape[1])
        for index, other in shared.others.items():
            if isinstance(layer := cache.layers[index], SfiLayer):
                take_states(layer, other)
            else:
                cache.layers[index] = copy.deepcopy(other)
        cache.detach()
        return shared.logits_BV

    def _read(self, start: int, stop: int) -> torch.Tensor:
        ids_BT, mask = self.ids_BT[:, start:stop], None
        if self._ragged:
            mask = self.mask_BT[:, :stop]
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start:]
        else:
            positions = torch.arange(start, stop, device=ids_BT.device).expand(len(ids_BT), -1)
        return self._forward(ids_BT, positions, mask)

    def _forward(self, ids_BT: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self._model(ids_BT, positions, mask, last=True)[:, -1]


def _on_two_tiers(shared: SharedPrompt, store: KVStore) -> SharedPrompt:
    # prompts that were read on the device, in an empty store of two tiers
    batch = len(shared.count)
    begin, count = [0] * batch, [0] * batch
    store.layers.owners = shared.store.layers.owners
    for layer in shared.store.layers:
        begin[:] = [0] * batch
        for row, length in enumerate(shared.count):
            for first, key, value in shared.store.blocks(layer, row, length):
                begin[row], count[row] = first, key.shape[2]
                # the other rows have no new tokens: their part is padding
                key_BHTD, value_BHTE = (x.expand(batch, -1, -1, -1) for x in (key, value))
                begin_B, count_B = torch.tensor([begin, count], dtype=torch.int32).to(key.device)
                store.append(layer, key_BHTD, value_BHTE, begin_B, count_B, begin, count)
            begin[row], count[row] = length, 0
    return replace(shared, store=store, copied=False)


def _draft_cost(session: Session) -> Cost:
    # the cost of a fast step relative to a verification, by the bytes that both read
    dense_layers, refreshes = session.policy.config.dense_layers, session.policy.refreshes()
    description = describe_model(session.model, session.shapes())
    model = ByteModel.of(description, dense_layers=dense_layers, batch=session.run.store.batch)

    def cost(length: float, attended: float) -> float:
        whole = model.slow(length, min(length, attended)) if refreshes else model.dense(length)
        return min(1.0, float(model.fast(length, attended)) / float(whole))

    return cost
