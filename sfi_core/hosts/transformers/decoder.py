"""A transformers model under a session, as `engine.loop` drives it: one batch of prompts."""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from sfi_core.engine.graphs import recorder
from sfi_core.engine.graphs.lookahead import audits_next
from sfi_core.engine.graphs.steps import StepGraphs
from sfi_core.engine.lossless.rule import DraftRule
from sfi_core.engine.prompt_queries import Watcher
from sfi_core.engine.run import Run
from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.hosts.transformers.block_pass import BlockPass
from sfi_core.hosts.transformers.cache import SfiCache, SfiLayer
from sfi_core.hosts.transformers.cache_name import CACHE_NAME
from sfi_core.hosts.transformers.lossless import draft_rule
from sfi_core.hosts.transformers.own_layers import take_states
from sfi_core.hosts.transformers.replays import records_steps, refusal
from sfi_core.hosts.transformers.session import Session
from sfi_core.machine.threads import SMALL_BYTES, one_thread
from sfi_core.models.describe import ModelWeights
from sfi_core.state.kv_store import KVStore
from sfi_kernels.step_descriptor import sent


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A transformers model under a session, as `engine.loop` drives it.

    The prompts are `ids_BT`, padded on the left, with 1 in `mask_BT` where a token counts; `shared` are
    prompts that were read already, or made up. A request may reach `capacity` tokens, generates at most
    `generated` (None for what `capacity` leaves), and ends with one of `stop_ids`. A forward pass reads
    `chunk` prompt tokens, 0 for all; `on_prefill` is then told of those read so far and in all. `requests`
    counts those that wait for a row too; None for those of the batch. The `watchers` look at every layer. A
    `patient` decoder records the graph of a slow step at the second such step, not the first.
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
    on_prefill: Callable[[int, int], None] | None = None
    patient: bool = True
    cache: SfiCache = field(init=False)
    _graphs: StepGraphs | None = field(init=False, default=None)
    _captures: bool = field(init=False)
    _small: bool = field(init=False)
    _missed: str = field(init=False, default="")
    _options: dict[str, Any] = field(init=False)
    _ragged: bool = field(init=False)

    def __post_init__(self) -> None:
        """Check whether steps can be recorded, and what the model's forward pass takes."""
        session, model = self.session, self.session.model
        self._captures = records_steps(session)
        if recorder.can_record(model.device) and session.engine.graphs is not False:
            self._missed = str(refusal(session) or "")
        self.cache = session.cache(self.capacity, self.ids_BT.shape[1], self.stop_ids)
        self.cache.requests, self.cache.generated = self.requests, self.generated
        known = inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._ragged = bool((self.mask_BT == 0).any())
        self._small = reads_little(session, len(self.ids_BT), self.capacity)

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
        logits = torch.empty(0)
        for start in range(0, T, self.chunk or T):
            stop = min(T, start + (self.chunk or T))
            logits = self._read(start, stop)
            if self.on_prefill is not None:
                self.on_prefill(stop, T)
        return logits

    def step(self, token_B: list[int]) -> torch.Tensor:
        """Decode one token of every request."""
        run = self.session.run
        with self.replaying() as replays:
            if replays:
                run.begin_decode()
                return self.replay([[token] for token in token_B])
            return self._step(run, token_B)

    @contextmanager
    def replaying(self) -> Iterator[bool]:
        """Say whether the step that the body begins and runs is replayed."""
        run = self.run
        if not self._captures:
            if self._missed:
                run.meter.not_replayed = self._missed
                run.meter.count("graph.eager")
            yield False
            return
        if self._graphs is None:
            self._graphs = StepGraphs(
                run, self._captured_pass, recorder.make_recorder(run.device),
                required=bool(self.session.engine.graphs), patient=self.patient,
            )  # fmt: skip
        if not audits_next(run):
            yield True
            return
        run.meter.count("graph.eager")
        with self._graphs.eager_step():
            yield False

    def replay(self, brought: Sequence[Sequence[int]]) -> torch.Tensor:
        """Replay a step that the run has begun; arguments and result are those of `StepGraphs.step`."""
        assert self._graphs is not None, "the step is replayed"
        logits_XV = self._graphs.step(brought)
        self.cache.see(self.cache.seen + 1)
        if self._graphs.given_up:
            self._missed = self.run.meter.not_replayed = self._graphs.given_up
            self._graphs, self._captures = None, False
        return logits_XV

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

    def ahead(self, token_B: torch.Tensor) -> None:
        """Launch the step of these tokens before the host has read them, where possible."""
        if self._graphs is not None and self.cache.seen + 1 < self.capacity:
            self._graphs.ahead(token_B)

    def draft_rule(self) -> DraftRule:
        """Return what ends a draft in a lossless run."""
        return draft_rule(self.session)

    def drafting(self) -> BlockPass:
        """Return the passes of a lossless run."""
        return BlockPass(self)

    def planned_pass(self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, run: Run | None = None) -> torch.Tensor:
        """Run a pass that the engine has begun; return the logits of every token, [B, T, V].

        A twin `run` takes the session's place.
        """
        run = run or self.session.run
        self.cache.attach(run)
        with run.observer.span("forward"), run.launches(), self.cache.planning():
            logits = self._logits(ids_BT, positions_BT, None, last=False)
        run.maintenance.join()
        return logits

    def alone(self, ids_1T: torch.Tensor, mask_1T: torch.Tensor, run: Run) -> Self:
        """Return a decoder that reads one more prompt into a row with a run of its own."""
        one = type(self)(
            session=self.session, ids_BT=ids_1T, mask_BT=mask_1T, capacity=self.capacity,
            stop_ids=self.stop_ids, chunk=self.chunk,
        )  # fmt: skip
        one.cache.attach(run)
        return one

    def seat(self, row: int, other: Self) -> None:
        """Give a row to a prompt that was read alone."""
        lengths = [state.length for state in self.run.requests]
        self.session.state_checks.positions(lengths)
        self.cache.seat(row, other.cache, max(lengths))

    def _begin_with(self, shared: SharedPrompt) -> torch.Tensor:
        session, cache = self.session, self.cache
        if session.tiers is not None and shared.store.whole_on_device:
            count = shared.count
            own = session.store(len(count), shared.capacity, shared.capacity - max(count))
            shared = _on_two_tiers(shared, own)
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

    def _captured_pass(self, token_BW: torch.Tensor, position_BW: torch.Tensor) -> torch.Tensor:
        # a step that the engine has planned; `update` counts its tokens each time that it is recorded
        seen = self.cache.seen
        self.cache.attach(self.session.run)
        try:
            with self.cache.planning():
                return self._logits(token_BW, position_BW, None, last=token_BW.shape[1] == 1)
        finally:
            self.cache.see(seen)

    def _read(self, start: int, stop: int) -> torch.Tensor:
        ids_BT, mask = self.ids_BT[:, start:stop], None
        if self._ragged:
            mask = self.mask_BT[:, :stop]
            positions = (mask.cumsum(1) - 1).clamp_min(0)[:, start:]
        else:
            positions = torch.arange(start, stop, device=ids_BT.device).expand(len(ids_BT), -1)
        return self._forward(ids_BT, positions, mask)

    def _forward(self, ids_BT: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self._logits(ids_BT, positions, mask, last=True)[:, -1]

    def _logits(
        self, ids_BT: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, *, last: bool
    ) -> torch.Tensor:
        # of the last token alone, where the model can leave the others out, or of all
        decodes = not last or ids_BT.shape[1] == 1
        with one_thread(wanted=self._small and decodes):
            output = self.session.model(
                input_ids=ids_BT, attention_mask=mask, position_ids=positions, use_cache=True,
                **{CACHE_NAME: self.cache}, **self._options if last else {},
            )  # fmt: skip
        logits: torch.Tensor = output.logits
        return logits


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


def reads_little(session: Session, batch: int, capacity: int) -> bool:
    """Say whether a decoding step on the CPU reads too few bytes to gain by threads."""
    rows = batch * capacity * sum(shape.row_bytes for shape in session.shapes())
    weights = ModelWeights.of(session.model).read(batch)
    return session.model.device.type == "cpu" and weights + rows < SMALL_BYTES
