"""One run of the slow-fast decoder over a batch: the KV store, the requests' states, and each step, for any host."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.engine import ledger
from sfi_core.engine.batch_pass import BatchPass, Descriptors, PromptQueries, Rows, SeenLayer, Watcher, known_requests
from sfi_core.engine.ledger import Meter, Reads, RequestPass, Shape
from sfi_core.engine.maintenance import Maintenance, schedule
from sfi_core.observers.events import BeginStepEvent, PromptEvent, RecallEvent, StepEvent
from sfi_core.observers.observer import Observer
from sfi_core.policies.base import EvidencePolicy, Notes, Policy
from sfi_core.settings.engine import DEFAULTS, AuditConfig, EngineOptions
from sfi_core.state.kv_store import KVStore, Recall
from sfi_core.state.layer_pages import LayerPages, PackedSegment
from sfi_core.state.request import RequestState
from sfi_core.state.side_stream import SideStream, side_of
from sfi_kernels.launch import counting
from sfi_kernels.step_descriptor import SLOW, sent

CPU = torch.device("cpu")
Counting = tuple[torch.Tensor, torch.cuda.Event | None]  # see `Run.counting`


@dataclass(slots=True)
class Run:
    """State of one run over a batch of requests.

    Attributes:
        ranks: The processes among which the model's heads are split.
        audit: Which steps are audited; None without an audit.
        watchers: Called for every layer, in this order, after `prompt_queries`.
        attend: Attention in place of the backend's, set by `StepGraphs`.
        requests: The state of each row's request.
        left: The states of ended requests whose row another request has taken.
        step: The batch's step; -1 before step 0.
        kept: What the policy keeps of all rows by layer (`Companion.keeps`), whose KV heads have `groups` query heads.
        dense_heads: By layer which KV heads are dense in which mode of a request, [4, H] int32, if the policy mixes.
        layers: Full-attention layers that have run so far; `options` are their `Layer.options`.
        early: By layer what was chosen for it before it attends (`select.Early`), on the stream `side`.
        late: By layer the new keys and values that the choice of this pass will append.
        written: Layers whose new keys and values the host writes to their places itself in this pass.
        notes: The policy's own notes, by request (not row) and layer.
        recorded: Whether the tokens of the last step have been noted.
        counting: The packed rows that the pass under way reads per row and KV head, and when the host may look.
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
    attend: Callable[[SeenLayer, torch.Tensor], torch.Tensor] | None = None
    requests: list[RequestState] = field(init=False)
    left: list[RequestState] = field(default_factory=list)
    step: int = -1
    segments: dict[int, PackedSegment] = field(default_factory=dict)
    kept: dict[int, Any] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    dense_heads: dict[int, torch.Tensor] = field(default_factory=dict)
    layers: set[int] = field(default_factory=set)
    options: dict[int, dict[str, Any]] = field(default_factory=dict)
    late: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    early: dict[int, Any] = field(default_factory=dict)
    side: SideStream = field(init=False)
    notes: dict[tuple[int, int], Notes] = field(default_factory=lambda: defaultdict(dict))
    prompt_queries: PromptQueries = field(init=False)
    maintenance: Maintenance = field(init=False)
    descriptors: Descriptors = field(init=False)
    recorded: bool = True
    counting: Counting | None = None
    _batch_pass: BatchPass | None = None

    def __post_init__(self) -> None:
        """Start with empty requests."""
        self.requests = [RequestState(request=row) for row in range(self.store.batch)]
        self.prompt_queries = PromptQueries(self.policy.config.window_prefill)
        overlap = self.engine.overlap and isinstance(self.policy, EvidencePolicy)
        self.maintenance = schedule(self.device, self.store.backend, overlap=overlap)
        self.side = side_of(self.device, overlap=self.engine.overlap and self.policy.predicts, role="early")
        self.descriptors = Descriptors(self.store, self.device)

    @property
    def batch_pass(self) -> BatchPass:
        """The forward pass under way."""
        assert self._batch_pass is not None, "a forward pass has begun"
        return self._batch_pass

    @property
    def states(self) -> list[RequestState]:
        """The states of all requests that have begun, by request."""
        return sorted([*self.left, *self.requests], key=lambda state: state.request)

    def requests_of(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Return the requests in some rows."""
        return tuple(self.requests[row].request for row in rows)

    def begin_prefill(self, count: Sequence[int], ids_BT: torch.Tensor | None = None, *, final: bool) -> None:
        """Enter a pass over `count` prompt tokens of each request; the final pass is step 0 (g_0 = 1).

        `ids_BT` are the tokens, padded on the left; None for embeddings and random keys.
        """
        if ids_BT is not None:
            requests = self.requests_of(range(len(count)))
            self.observer.on(PromptEvent(requests=requests, ids_BT=ids_BT, count=tuple(count)))
        self.begin([RequestPass.prompt(new, ends=final) for new in count])

    def begin_decode(self) -> None:
        """Enter the step whose input are the tokens last given to `record`, x_{t-1}."""
        assert self.recorded, "the last step's tokens have been noted"
        self.begin(ledger.plan_step(self.policy, self.requests))

    def begin(self, passes: Sequence[RequestPass]) -> None:
        """Enter a forward pass, of prompts or of decoding requests; `passes` says what each does in it."""
        # a prompt's pieces are one step, which the first prompts' last piece begins, but a later prompt's first piece
        ends_first_prompts = self.step < 0 and any(request.generates for request in passes)
        continues_prompt = self._batch_pass is not None and not self._batch_pass.generates
        if ends_first_prompts or (self.step >= 0 and not continues_prompt):
            self.step += 1
        if self.recorded:  # otherwise the clock runs since an earlier piece of the prompt
            self.meter.begin()
        self.recorded, self.counting = False, None
        self.early.clear()  # of a step that broke off
        self.written.clear()
        start = [state.length for state in self.requests]
        for request, state in zip(passes, self.requests, strict=True):
            ledger.enter(state, request, self.policy)
        self.describe(passes, start)
        if self.descriptors.launched:
            self.meter.began = self.meter.ended  # the device has worked on this step since then
        if BeginStepEvent in self.observer.wants:
            batch_pass = self.batch_pass
            event = BeginStepEvent(
                step=self.step, slow=self.requests_of((*batch_pass.prompts, *batch_pass.slow)),
                fast=self.requests_of(batch_pass.fast), reads_prompt=bool(batch_pass.prompts),
                not_replayed=self.meter.not_replayed,
            )  # fmt: skip
            self.observer.on(event)

    def describe(self, passes: Sequence[RequestPass], start: Sequence[int]) -> None:
        """Describe the pass that the requests have entered; `start` has their cached tokens before it."""
        with self.launches():
            known = known_requests(passes, self.requests, self.policy)
            described = self.descriptors.describe(known)
        self._batch_pass = BatchPass(passes, start, *described)

    def append(self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> LayerPages:
        """Write the pass's new keys and values of a layer to the store, or leave that to a `coded` policy's choice."""
        store, batch_pass, step = self.store, self.batch_pass, self.batch_pass.descriptor
        store.grow(batch_pass.longest)
        self.layers.add(layer)
        if layer in self.written:
            self.written.remove(layer)
            return store.pages(layer)
        coded = self.policy.coded and layer not in self.policy.config.dense_layers
        if coded and batch_pass.decodes and store.backend == "triton" and store.whole_on_device:
            self.late[layer] = key_BHTD, value_BHTE
            return store.pages(layer)
        appended = step.append_start_B, step.append_count_B, batch_pass.start, batch_pass.count
        with self.launches(), self.observer.span("append", layer):
            return store.append(layer, key_BHTD, value_BHTE, *appended)

    def places(self, layer: int) -> tuple[torch.Tensor, ...] | None:
        """Return the operands of `pack.append` behind keys and values, for a host that does a layer's `append` itself.

        None where it must not: only decoding steps on Triton write to one tier in one launch.
        """
        store, batch_pass, step = self.store, self.batch_pass, self.batch_pass.descriptor
        plain = store.backend == "triton" and layer in store.layers and store.ring(layer) is None
        if not plain or not batch_pass.decodes:
            return None
        store.grow(batch_pass.longest)
        self.written.add(layer)
        return step.append_start_B, step.append_count_B, *store.pages(layer).tensors, store.block_table_BP

    def lend(self, owner: int, reader: int) -> None:
        """Let a layer read the keys and values of another one; its selections are its own."""
        self.store.layers.owners[reader] = owner
        self.layers.add(reader)

    def tell(self, layer: SeenLayer, query_BHGTD: torch.Tensor, out_BHGTE: torch.Tensor) -> None:
        """Show the watchers the queries and outputs of a layer."""
        batch_pass = self.batch_pass
        if batch_pass.prompts != batch_pass.ended and self.policy.selects_after:
            self.prompt_queries.see(layer, query_BHGTD, out_BHGTE)
        for watcher in self.watchers:
            watcher.see(layer, query_BHGTD, out_BHGTE)

    def record(self, token_B: Sequence[int]) -> None:
        """Note each row's new token x_t, if the pass gave the row one, and tell the observer."""
        self.lap()
        self.settle_selected()
        meter, shape = self.meter, {"elapsed_us": self.meter.lasted * 1e6, **self.shape()}
        for state, request, token in zip(self.requests, self.batch_pass.passes, token_B, strict=True):
            if request.generates:
                fields = ledger.step_fields(state, self.step, self.reads(state), self.audit)
                event = ledger.close_step(fields, state, token, **shape)
                state.tally.time_step(state.step, meter.began, meter.ended)
                state.finished = token in self.stop_ids
                self.observer.on(event)
        self.recorded = True

    def lap(self) -> float:
        """End the pass's time, and return its seconds."""
        kind = len(self.batch_pass.slow), len(self.batch_pass.fast)
        return self.meter.lap(kind, prefill=not self.batch_pass.decodes)

    def count_selected(self) -> None:
        """Begin to count the packed rows that fast requests read, unless the policy `fills`, without waiting."""
        sparse = self.layers.difference(self.policy.config.dense_layers)
        lengths = [self.segments[layer].length_BH for layer in sorted(sparse.intersection(self.segments))]
        if self.policy.fills or not (self.batch_pass.fast and lengths):
            return
        mean_B, done = torch.cat(lengths, 1).float().mean(1), None
        if mean_B.is_cuda:
            host_B = torch.empty(mean_B.shape, pin_memory=True)
            mean_B = host_B.copy_(mean_B, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self.device))
        self.counting = mean_B, done

    def settle_selected(self) -> None:
        """Note what `count_selected` has counted in the states of the fast requests."""
        if self.counting is None:
            self.count_selected()  # for a host that does not, at the price of a wait
        note_selected(self.counting, {row: self.requests[row] for row in self.batch_pass.fast})

    def end_pass(self) -> None:
        """End a pass whose tokens the host notes itself."""
        self.maintenance.join()
        self.meter.lap(prefill=not self.batch_pass.decodes)
        self.recorded = True

    def segment(self, layer: int) -> PackedSegment:
        """Return a layer's packed segment, allocated once for the whole run."""
        config = self.policy.config
        rows = config.sink + min(config.budget, self.store.capacity) * self.policy.selects
        if layer not in self.segments:
            pages = self.store.ring(layer) or self.store.pages(layer)
            self.segments[layer] = PackedSegment(
                self.store.batch, rows, pages.key_PHND, pages.value_PHNE, packs=not self.in_place
            )
        self.segments[layer].reserve(rows)  # more rows once the store has grown
        return self.segments[layer]

    @property
    def in_place(self) -> bool:
        """Whether fast steps read rows in the pages, as policies do that choose at every step; not with host memory."""
        return self.store.whole_on_device and self.policy.chooses

    @property
    def packs_ahead(self) -> bool:
        """Whether a step packs the rows of the next one over those that it reads."""
        return self.policy.ahead and not self.in_place

    def keep(self, layer: int, group: int) -> Any:
        """Return what the policy keeps of all rows in a layer, with the store's room, if anything.

        A KV head has `group` query heads.
        """
        capacity, kept = self.store.capacity, self.kept.get(layer)
        if kept is None and self.policy.has_kept:
            pages, self.groups[layer] = self.store.ring(layer) or self.store.pages(layer), group
            sizes = self.store.batch, group, pages.key_PHND, pages.value_PHNE, capacity
            kept = self.policy.companion.keeps(*sizes)
        if kept is not None:
            kept = self.kept[layer] = kept.grown(capacity)
        return kept

    def dense_heads_of(self, layer: int, heads: int) -> torch.Tensor:
        """Return which of a layer's KV heads are dense in each mode of `step_descriptor`, [4, H] int32."""
        if layer not in self.dense_heads:
            kinds = [self.policy.companion.dense_heads(layer, heads, slow=mode == SLOW) for mode in range(SLOW + 1)]
            marks = torch.tensor([[int(head in dense) for head in range(heads)] for dense in kinds], dtype=torch.int32)
            self.dense_heads[layer] = sent(marks, self.device)
        return self.dense_heads[layer]

    def count_heads(self, layer: int, row: int) -> None:
        """Note what the KV heads of a request that read everything read over the link."""
        ring = self.store.ring(layer)
        if ring is None:
            return
        state, heads = self.requests[row], self.store.pages(layer).key_PHND.shape[1]
        homes = 0 if ring.heads is None else ring.heads.key_PRND.shape[1]
        dense = len(self.policy.companion.dense_heads(layer, heads, slow=state.slow))
        self.store.count_read(layer, max(0, dense - homes) / heads * state.length)

    def reads(self, state: RequestState) -> Reads:
        """Count what a request's step reads."""
        others = self.layers.difference(self.policy.config.dense_layers)
        dense = len(self.layers) - len(others)
        if not (self.policy.mixes_heads and state.step > 0):
            return Reads.of(state, self.policy, len(self.layers), dense)
        shares = 0.0
        for layer in others:
            heads = self.store.pages(layer).key_PHND.shape[1]
            shares += len(self.policy.companion.dense_heads(layer, heads, slow=state.slow)) / heads
        return Reads.of(state, self.policy, len(self.layers), dense, shares)

    def rows(self, rows: tuple[int, ...]) -> Rows:
        """Return the tensors to refresh some requests with; all layers of the pass share them."""
        chosen, step = self.batch_pass.chosen, self.batch_pass.descriptor
        if rows not in chosen:
            states = {row: self.requests[row] for row in rows}
            chosen[rows] = Rows.of(states, self.policy.config.sink, step, self.store.block_table_BP)
        return chosen[rows]

    def launches(self) -> AbstractContextManager[object]:
        """Count the Triton kernels launched inside, and chain them if the engine does."""
        if self.store.backend != "triton":
            return nullcontext()
        return counting(self.meter.kernels, chained=self.engine.chained)

    def tell_recall(self, layers: Sequence[int], places: Mapping[int, int], recall: Recall) -> None:
        """Count some layers' recall, and tell the observer, once the rows have arrived from the host.

        `places` has by row of the batch the request's place among those of a layer in the recall.
        """
        batch_step, observer, meter = self.step, self.observer, self.meter
        steps = [(place, self.requests[row].request, self.requests[row].step) for row, place in places.items()]

        def tell() -> None:
            if batch_step > 0:  # those of step 0 belong to reading the prompt
                rows, size = recall.rows_RH.sum(), recall.row_bytes
                meter.recalled[size] = meter.recalled[size] + rows if size in meter.recalled else rows
                meter.recall_seconds += recall.waited
            if RecallEvent not in observer.wants:
                return
            for layer, rows_RH in zip(layers, recall.rows_RH.chunk(len(layers)), strict=True):
                for place, request, step in steps:
                    event = RecallEvent(
                        request=request, step=step, layer=layer, rows_H=rows_RH[place],
                        row_bytes=recall.row_bytes, waited_us=recall.waited * 1e6 / len(steps),
                    )  # fmt: skip
                    observer.on(event)

        recall.then(tell)

    def shape(self, batch_pass: BatchPass | None = None, states: Sequence[RequestState] = ()) -> Shape:
        """Return the fields of `StepEvent` that a pass's requests share, before they end their step, if wanted.

        By default those of the pass under way; another's with the `states` of its rows.
        """
        if StepEvent not in self.observer.wants:
            return {}
        batch_pass, states = batch_pass or self.batch_pass, states or self.requests
        policy, meter = self.policy, self.meter
        if meter.row_bytes[0] != len(self.layers):
            sizes = {layer: self.store.pages(layer).row_bytes for layer in self.layers}
            dense = sum(sizes[layer] for layer in self.layers.intersection(policy.config.dense_layers))
            meter.row_bytes = len(self.layers), dense, sum(sizes.values()) - dense
        _, always, other = meter.row_bytes

        def moved(state: RequestState) -> float:
            if policy.mixes_heads:
                return float((always + other) * self.reads(state).attended)
            return float(always * state.length + other * state.read(dense=state.slow))

        slow = [states[row] for row in (*batch_pass.prompts, *batch_pass.slow)]
        shared = ledger.step_shape(slow, [states[row] for row in batch_pass.fast], moved)
        return {"graphs": meter.replayed, **shared}


def note_selected(counting: Counting | None, states: Mapping[int, RequestState]) -> None:
    """Note what `Run.count_selected` has counted, once it has, in the states of fast requests, by row."""
    if counting is None:
        return
    mean_B, done = counting
    if done is not None:
        done.synchronize()
    for row, state in states.items():
        state.unfilled = state.packed_tokens - float(mean_B[row])
