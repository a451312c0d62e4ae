"""One run of the slow-fast decoder: its cache, its requests' states and what happens at each step.

Knows nothing of transformers: whoever drives the model says when a forward pass begins, hands over each
layer's keys, values and queries, and tells which tokens were sampled.
"""

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.engine.audit import Audit
from sfi_core.engine.forward import Forward, Rows, describe_pass, step_requests
from sfi_core.engine.graphs.buffers import FixedStep
from sfi_core.engine.maintenance import Maintenance, side_of
from sfi_core.observers.events import BeginStepEvent, StepEvent
from sfi_core.observers.observer import NullObserver, Observer
from sfi_core.policies.base import Notes, Policy, StepContext
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.state.kv_cache import KVCache, LayerPages
from sfi_core.state.packed_segment import PackedSegment
from sfi_core.state.request import SparseState
from sfi_core.triggers.signals import Signals
from sfi_kernels.launch import counting
from sfi_kernels.step_descriptor import StepDescriptor

if TYPE_CHECKING:
    from sfi_core.engine.shared_prompt import SharedPrompt

CPU = torch.device("cpu")
SHARED = -1  # of `Run.notes`


@dataclass(slots=True)
class Run:
    """State of one run over a batch of requests.

    Attributes:
        policy: Decides what is slow and what is selected; owns the settings.
        observer: Told of every step, refresh and span.
        cache: The paged KV cache.
        stop_ids: Tokens that end a request.
        device: Where the cache is.
        audit: Looks at every layer of the audited steps; None without an audit.
        engine: How steps are run.
        ranks: The processes among which the model's heads are split.
        requests: The sparse state of each row's request.
        left: That of the requests that have ended and left their row to another one.
        step: The batch's step; -1 before step 0.
        born: When the run was made, by the clock of `time.perf_counter`.
        segments: The packed segment by layer.
        tails: Last queries of earlier pieces of the prompt by layer, for the prefill's evidence.
        paths: Attention and maintenance calls by what really ran: requests x layers x steps.
        kernels: Triton kernels launched, by name, step and layer; layer -1 is the step's own.
        forward: The forward pass under way.
        layers: Full-attention layers seen.
        descriptor: The pass's step descriptor; made once for all layers.
        dense_descriptor: The same with every request slow, for the layers left dense; None without such.
        signals: What the policy's plan looks at besides tokens; None for nothing.
        notes: What the policy keeps, by request (not row) and layer; `SHARED` stands for all layers.
        fixed: What decoding steps share, where they run as CUDA graphs; None where they do not.
        maintenance: Selects and packs on slow steps, beside the next layers where it can.
        prompt: Collects the prompt for other runs to begin with; None without such.
        prefill_seconds: Wall time of reading prompts, step 0 of every request.
        decode_seconds: Wall time of the other steps.
    """

    policy: Policy
    observer: Observer
    cache: KVCache
    stop_ids: frozenset[int] = frozenset()
    device: torch.device = CPU
    audit: Audit | None = None
    engine: EngineOptions = DEFAULTS
    ranks: Ranks = ALONE
    requests: list[SparseState] = field(init=False)
    left: list[SparseState] = field(default_factory=list)
    step: int = -1
    born: float = field(default_factory=time.perf_counter)
    segments: dict[int, PackedSegment] = field(default_factory=dict)
    tails: dict[int, torch.Tensor] = field(default_factory=dict)
    paths: Counter[str] = field(default_factory=Counter)
    kernels: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    forward: Forward | None = None
    layers: set[int] = field(default_factory=set)
    descriptor: StepDescriptor = field(init=False)
    dense_descriptor: StepDescriptor | None = None
    signals: Signals | None = field(init=False)
    maintenance: Maintenance = field(init=False)
    fixed: FixedStep | None = None
    notes: dict[tuple[int, int], Notes] = field(default_factory=lambda: defaultdict(dict))
    prompt: "SharedPrompt | None" = None
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _began: float = field(default_factory=time.perf_counter)
    _ended: float = 0.0
    _recorded: bool = True
    _rows: dict[tuple[int, ...], Rows] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with empty requests."""
        self.requests = [SparseState(request=row) for row in range(self.cache.batch)]
        self.signals = Signals(self.policy.signal, self.ranks) if self.policy.signal else None
        apart = self.engine.overlap and self.policy.selects_apart
        self.maintenance = Maintenance(side_of(self.device, overlap=apart))

    @property
    def done(self) -> bool:
        """Whether the request of every row has ended."""
        return all(state.finished for state in self.requests)

    @property
    def states(self) -> list[SparseState]:
        """The states of all requests that have begun, in order."""
        return sorted([*self.left, *self.requests], key=lambda state: state.request)

    def requests_of(self, rows: Iterable[int]) -> tuple[int, ...]:
        """Return which requests are in some rows."""
        return tuple(self.requests[row].request for row in rows)

    def begin_prefill(self, count: list[int], *, final: bool) -> None:
        """Enter a forward pass over `count` prompt tokens of each request.

        The last one is step 0: dense by nature, and slow (g_0 = 1).
        """
        start = [state.length for state in self.requests]
        reading = self.forward is not None and not (self.forward.decode or self.forward.final)
        if final if self.step < 0 else not reading:  # pieces before step 0 are -1
            self.step += 1
        self._enter(Forward(decode=False, final=final, start=start, count=count))
        for state, new in zip(self.requests, count, strict=True):
            if final:
                state.begin(slow=True, reason="first", new_tokens=new)
                state.prompt_tokens = state.length - len(state.tokens)
                self.move_recent(state)
            else:
                state.length += new
        self._describe()
        slow = self.requests_of(row for row, new in enumerate(count) if new)
        self.observer.on_begin_step(
            BeginStepEvent(step=self.step, slow=slow, fast=(), reads_prompt=True)
        )

    @property
    def recorded(self) -> bool:
        """Whether the tokens of the last step have been noted already."""
        return self._recorded

    def begin_decode(self) -> None:
        """Enter the step whose input is x_{t-1}, noted by `record`, under the policy's plan."""
        assert self._recorded, "the last step's tokens have been noted"
        if self.signals is not None:
            self.signals.settle(self.requests)
        plan = self.policy.plan(StepContext(self.requests))
        if self.engine.synchronized:
            plan = plan.synchronized([not state.finished for state in self.requests])
        self.step += 1
        start = [state.length for state in self.requests]
        count = [0 if state.finished else 1 for state in self.requests]
        self._enter(Forward(decode=True, final=False, start=start, count=count))
        for row, state in enumerate(self.requests):
            if not state.finished:
                state.begin(slow=plan.slow_B[row], reason=plan.reason_B[row], new_tokens=1)
                self.move_recent(state)
        self._describe()
        slow, fast = (
            self.requests_of(rows) for rows in (self.descriptor.slow, self.descriptor.fast)
        )
        self.observer.on_begin_step(BeginStepEvent(step=self.step, slow=slow, fast=fast))

    def append(self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> LayerPages:
        """Put the pass's new keys and values of a layer into the cache."""
        assert self.forward is not None, "a forward pass has begun"
        self.cache.grow(max(self.forward.length))
        self.layers.add(layer)
        step = self.descriptor
        with self.counted(layer), self.observer.span("append", layer):
            return self.cache.append(
                layer,
                key_BHTD,
                value_BHTE,
                step.append_start_B,
                step.append_count_B,
                max(self.forward.length),
            )

    def record(self, token_B: list[int]) -> None:
        """Note the tokens x_t that the step generated, and tell the observer."""
        now = self._ended = time.perf_counter()
        elapsed = now - self._began
        if self.forward is not None and not self.forward.decode:
            self.prefill_seconds += elapsed
        else:
            self.decode_seconds += elapsed
        for state, token in zip(self.requests, token_B, strict=True):
            if state.finished:
                continue
            state.finish_step(token)
            state.time_step(self._began, now)
            state.finished = token in self.stop_ids
            attended = self._attended(state)
            if state.step > 0:
                state.attended += attended
                state.context += state.length
                if not state.slow:
                    state.selecting += self.policy.selection_tokens(state)
            self.observer.on_step(
                StepEvent(
                    request=state.request,
                    step=state.step,
                    batch_step=self.step,
                    position=state.length - 1,
                    token_id=token,
                    slow=state.slow,
                    reason=state.reason,
                    steps_since_slow=state.steps_since_slow,
                    attended_tokens=attended,
                    context_tokens=state.length,
                    elapsed_us=elapsed * 1e6,
                    audited=self.audit is not None and self.audit.due(state),
                )
            )
        self._recorded = True

    def segment(self, layer: int) -> PackedSegment:
        """Return a layer's packed segment, allocated once for the whole run."""
        config = self.policy.config
        selects = self.policy.selects_before or self.policy.selects_after
        rows = config.sink + (min(config.budget, self.cache.capacity) if selects else 0)
        if layer not in self.segments:
            pages = self.cache.layers[layer]
            self.segments[layer] = PackedSegment(self.cache.batch, rows, pages, self.cache.backend)
        self.segments[layer].reserve(rows)  # the cache may have grown
        return self.segments[layer]

    def rows(self, rows: tuple[int, ...]) -> Rows:
        """Return what the layers need to refresh some requests; made once for all layers of the pass."""
        if rows not in self._rows:
            table, step = self.cache.block_table_BP, self.descriptor
            self._rows[rows] = Rows.of(rows, self.requests, self.policy.config.sink, step, table)
        return self._rows[rows]

    def shadow(self) -> "Run":
        """Return a run over the same cache whose every request is slow, for the pass under way.

        A forward pass under it writes what the pass itself will overwrite, and nothing else of this run.
        """
        assert self.forward is not None, "a forward pass has begun"
        policy = Policy(self.policy.config, self.policy.trigger)
        twin = Run(policy, NullObserver(), self.cache, device=self.device)
        twin.requests = [dataclasses.replace(state, slow=True) for state in self.requests]
        twin.segments, twin.layers, twin.forward = self.segments, self.layers, self.forward
        twin.step = self.step
        twin._describe()
        return twin

    @contextmanager
    def counted(self, layer: int) -> Iterator[None]:
        """Count the Triton kernels launched inside under the step and a layer."""
        launched: Counter[str] = Counter()
        with counting(launched):
            yield
        for name, count in launched.items():
            self.kernels[name, self.step, layer] += count

    def _enter(self, forward: Forward) -> None:
        if self._recorded:  # otherwise an earlier piece of the prompt is still being timed
            self._began = time.perf_counter()
        self._recorded = False
        self.forward = forward

    def _describe(self) -> None:
        assert self.forward is not None, "a forward pass has begun"
        self._rows = {}
        if self.fixed is not None and self.forward.decode:
            known = partial(step_requests, self.forward, self.requests, self.policy)
            self.descriptor, self.dense_descriptor = self.fixed.enter(known)
            if self.fixed.launched:  # since the last one's tokens were read, or before
                self._began = self._ended
            return
        with self.counted(-1):
            self.descriptor, self.dense_descriptor = describe_pass(
                self.forward, self.requests, self.policy, self.cache, self.device
            )

    def move_recent(self, state: SparseState) -> None:
        """Place a request's recent segment for the step it has entered."""
        config = self.policy.config
        state.move_recent(config.sink, config.recent, sliding=config.recent_mode == "sliding")

    def _attended(self, state: SparseState) -> float:
        if state.slow:
            return state.length
        dense = len(self.layers & set(self.policy.config.dense_layers))
        fast = state.packed_tokens + state.length - state.recent_start
        return (dense * state.length + (len(self.layers) - dense) * fast) / max(1, len(self.layers))
