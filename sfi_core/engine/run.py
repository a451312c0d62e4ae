"""One run of the slow-fast decoder: its store, its requests' states and what happens at each step.

Knows nothing of the library that runs the model. The host says when a forward pass begins, hands over each
layer's keys, values and queries, and tells which tokens were sampled.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.engine.forward import (
    Descriptors,
    Forward,
    FreshDescriptors,
    RequestPass,
    known_requests,
)
from sfi_core.engine.maintenance import Maintenance
from sfi_core.engine.meter import WHOLE_STEP, Meter
from sfi_core.engine.prompt_queries import PromptQueries
from sfi_core.engine.rows import Rows
from sfi_core.engine.telling import Shape, step_event, step_shape, tell_beginning
from sfi_core.engine.watcher import Watcher
from sfi_core.observers.observer import Observer
from sfi_core.policies.base import EvidencePolicy, Policy
from sfi_core.policies.context import Notes
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.state.kv_store import KVStore
from sfi_core.state.layer_pages import LayerPages
from sfi_core.state.packed_segment import PackedSegment
from sfi_core.state.request import RequestState
from sfi_core.state.side import side_of
from sfi_kernels.step_descriptor import FAST, SLOW

CPU = torch.device("cpu")


@dataclass(slots=True)
class Run:
    """State of one run over a batch of requests.

    Attributes:
        policy: Decides what is slow and what is selected; owns the settings.
        observer: Told of every step, refresh and span.
        store: The keys and values.
        stop_ids: Tokens that end a request.
        device: Where the store is.
        engine: How steps are run.
        ranks: The processes among which the model's heads are split.
        audit: Which steps are audited; None without an audit.
        watchers: Look at every layer, in this order, after `prompt_queries`.
        meter: What ran, how often, and how long it took.
        attend: How layers attend, where `StepGraphs` has set it; None attends on the store's backend.
        requests: The state of each row's request.
        left: Those of the requests that have ended and left their row to another one.
        step: The batch's step; -1 before step 0.
        segments: The packed segment by layer.
        layers: Full-attention layers seen.
        notes: What the policy keeps, by request (not row) and layer.
        prompt_queries: The last queries of pieces of the prompt, for the first selection.
        maintenance: Selects and packs on slow steps, beside the next layers where it can.
        descriptors: Writes the descriptors of each pass.
        recorded: Whether the tokens of the last step have been noted.
    """

    policy: Policy
    observer: Observer
    store: KVStore
    stop_ids: frozenset[int] = frozenset()
    device: torch.device = CPU
    engine: EngineOptions = DEFAULTS
    ranks: Ranks = ALONE
    audit: AuditConfig | None = None
    watchers: tuple[Watcher, ...] = ()
    meter: Meter = field(default_factory=Meter)
    attend: Callable[[Any, torch.Tensor], torch.Tensor] | None = None
    requests: list[RequestState] = field(init=False)
    left: list[RequestState] = field(default_factory=list)
    step: int = -1
    segments: dict[int, PackedSegment] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)
    notes: dict[tuple[int, int], Notes] = field(default_factory=lambda: defaultdict(dict))
    prompt_queries: PromptQueries = field(init=False)
    maintenance: Maintenance = field(init=False)
    descriptors: Descriptors = field(init=False)
    recorded: bool = True
    _forward: Forward | None = None

    def __post_init__(self) -> None:
        """Start with empty requests."""
        policy = self.policy
        self.requests = [RequestState(request=row) for row in range(self.store.batch)]
        self.prompt_queries = PromptQueries(policy.config.window_prefill)
        overlap = self.engine.overlap and isinstance(policy, EvidencePolicy)
        self.maintenance = Maintenance(side_of(self.device, overlap=overlap))
        self.descriptors = FreshDescriptors(policy, self.store, self.device)

    @property
    def forward(self) -> Forward:
        """The forward pass under way."""
        assert self._forward is not None, "a forward pass has begun"
        return self._forward

    @property
    def done(self) -> bool:
        """Whether the request of every row has ended."""
        return all(state.finished for state in self.requests)

    @property
    def states(self) -> list[RequestState]:
        """The states of all requests that have begun, in order."""
        return sorted([*self.left, *self.requests], key=lambda state: state.request)

    def requests_of(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Return which requests are in some rows."""
        return tuple(self.requests[row].request for row in rows)

    def begin_prefill(self, count: Sequence[int], *, final: bool) -> None:
        """Enter a forward pass over `count` prompt tokens of each request.

        The last one is step 0: dense by nature, and slow (g_0 = 1).
        """
        self.begin([RequestPass.prompt(new, ends=final) for new in count])

    def begin_decode(self) -> None:
        """Enter the step whose input is x_{t-1}, noted by `record`."""
        assert self.recorded, "the last step's tokens have been noted"
        self.begin(
            [
                RequestPass()
                if state.finished
                else RequestPass.decode(slow=bool(reason), reason=reason)
                for state, reason in zip(self.requests, self.plan(), strict=True)
            ]
        )

    def plan(self) -> list[str]:
        """Ask the policy why each request is slow at the next step, "" for fast; most ask their trigger."""
        return self.policy.plan(self.requests)

    def begin(self, passes: Sequence[RequestPass]) -> None:
        """Enter a forward pass in which every request does its own."""
        # the pieces of one prompt are one step: the last one where no step has begun, else the first
        generates = any(one.generates for one in passes)
        reads_on = self._forward is not None and not self._forward.generates
        if generates if self.step < 0 else not reads_on:
            self.step += 1
        if self.recorded:  # otherwise an earlier piece of the prompt is still being timed
            self.meter.begin()
        self.recorded = False
        start = [state.length for state in self.requests]
        for one, state in zip(passes, self.requests, strict=True):
            self._enter(one, state)
        self.describe(passes, start)
        if self.descriptors.launched:
            self.meter.begin_with_the_last()
        tell_beginning(self)

    def describe(self, passes: Sequence[RequestPass], start: Sequence[int]) -> None:
        """Write down a pass that the requests have entered; `start` has their cached tokens before it."""
        with self.launches(WHOLE_STEP):
            known = known_requests(passes, self.requests, self.policy)
            described = self.descriptors.describe(known)
        self._forward = Forward.of(passes, start, *described)

    def append(self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> LayerPages:
        """Put the pass's new keys and values of a layer into the store."""
        longest, step = self.forward.longest, self.forward.descriptor
        self.store.grow(longest)
        self.layers.add(layer)
        with self.launches(layer), self.observer.span("append", layer):
            return self.store.append(
                layer,
                key_BHTD,
                value_BHTE,
                step.append_start_B,
                step.append_count_B,
                self.forward.start,
                self.forward.count,
            )

    def tell(self, layer: Any, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Show all that watch what a layer, an `engine.layer.Layer`, has attended."""
        forward = self.forward
        if forward.prompts != forward.ended and self.policy.selects_after:
            self.prompt_queries.see(layer, query_BHGTD, out_BHGTE)
        for watcher in self.watchers:
            watcher.see(layer, query_BHGTD, out_BHGTE)

    def record(self, token_B: Sequence[int]) -> None:
        """Note the tokens x_t, one a row, of the requests that the pass gave one; tell the observer."""
        self.meter.lap(prefill=not self.forward.decodes)
        shape = step_shape(self)
        rows = zip(self.requests, self.forward.passes, token_B, strict=True)
        for state, one, token in rows:
            if one.generates:
                self._record(state, token, shape)
        self.recorded = True

    def end_pass(self) -> None:
        """End a pass whose tokens are noted elsewhere, by whoever planned it."""
        self.maintenance.join()
        self.meter.lap(prefill=not self.forward.decodes)
        self.recorded = True

    def segment(self, layer: int) -> PackedSegment:
        """Return a layer's packed segment, allocated once for the whole run."""
        config = self.policy.config
        selects = self.policy.selects_before or self.policy.selects_after
        rows = config.sink + (min(config.budget, self.store.capacity) if selects else 0)
        if layer not in self.segments:
            self.segments[layer] = PackedSegment(self.store.batch, rows, self.store.pages(layer))
        self.segments[layer].reserve(rows)  # the store may have grown
        return self.segments[layer]

    def attended(self, state: RequestState) -> float:
        """Return the tokens that a request's step reads for each KV head; see `RequestState.attended`."""
        others = self.layers.difference(self.policy.config.dense_layers)
        dense = len(self.layers) - len(others)
        if not (self.policy.mixes_heads and state.step > 0):
            return state.attended(len(self.layers), dense)
        shares = 0.0
        for layer in others:
            heads = self.store.pages(layer).key_PHND.shape[1]
            shares += len(self.policy.dense_heads(state, layer, heads)) / heads
        return state.attended(len(self.layers), dense, shares)

    def rows(self, rows: tuple[int, ...]) -> Rows:
        """Return what the layers need to refresh some requests; made once for all layers of the pass."""
        chosen = self.forward.chosen
        if rows not in chosen:
            table, step = self.store.block_table_BP, self.forward.descriptor
            chosen[rows] = Rows.of(rows, self.requests, self.policy.config.sink, step, table)
        return chosen[rows]

    def launches(self, layer: int = WHOLE_STEP) -> AbstractContextManager[None]:
        """Count the Triton kernels launched inside under the step, and a layer if one is meant."""
        if self.store.backend != "triton":
            return nullcontext()
        return self.meter.launches(self.step, layer)

    def move_recent(self, state: RequestState) -> None:
        """Place a request's recent segment for the step it has entered."""
        config = self.policy.config
        state.move_recent(config.sink, config.recent, sliding=config.recent_mode == "sliding")

    def _enter(self, one: RequestPass, state: RequestState) -> None:
        if one.ends_prompt:
            state.begin(slow=True, reason=one.reason, new_tokens=one.count)
            state.prompt_tokens = state.length - len(state.tokens)
            self.move_recent(state)
        elif one.kind in (FAST, SLOW):
            state.begin(
                slow=one.kind == SLOW, reason=one.reason, new_tokens=one.count, steps=one.count
            )
            self.move_recent(state)
        else:
            state.length += one.count

    def _record(self, state: RequestState, token: int, shape: Shape) -> None:
        state.finish_step(token)
        state.tally.time_step(state.step, self.meter.began, self.meter.ended)
        state.finished = token in self.stop_ids
        attended = self.attended(state)
        if state.step > 0:
            selecting = 0.0 if state.slow else self.policy.selection_tokens(state)
            state.tally.count_reads(attended, state.length, selecting)
        audited = self.audit is not None and self.audit.due(state.step, slow=state.slow)
        seconds, more = self.meter.lasted, {"audited": audited, **shape}
        self.observer.on(step_event(state, self.step, attended, seconds, **more))
