"""One run of the slow-fast decoder: its cache, its requests' states and what happens at each step.

Knows nothing of transformers: whoever drives the model says when a forward pass begins, hands over each
layer's keys, values and queries, and tells which tokens were sampled.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import torch

from sfi_core.kv_cache import KVCache, LayerPages
from sfi_core.observer import Observer, StepEvent
from sfi_core.packed_segment import PackedSegment
from sfi_core.policies.base import Policy, StepContext
from sfi_core.sparse_state import SparseState


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass under way: the step descriptor of the reference backend.

    Attributes:
        decode: Whether it decodes one token a request, instead of reading the prompt.
        final: Whether it reads the last piece of the prompt, step 0.
        start: Cached tokens of each request before it.
        count: New tokens of each request; 0 leaves a request out.
    """

    decode: bool
    final: bool
    start: list[int]
    count: list[int]

    @property
    def length(self) -> list[int]:
        """Cached tokens of each request after it."""
        return [start + count for start, count in zip(self.start, self.count, strict=True)]


@dataclass(slots=True)
class Run:
    """State of one run over a batch of requests.

    Attributes:
        policy: Decides what is slow and what is selected; owns the settings.
        observer: Told of every step, refresh and span.
        cache: The paged KV cache.
        stop_ids: Tokens that end a request.
        requests: The sparse state of each request.
        segments: The packed segment by layer.
        tails: Last queries of earlier pieces of the prompt by layer, for the prefill's evidence.
        paths: Attention and maintenance calls by what really ran: requests x layers x steps.
        forward: The forward pass under way.
        layers: Full-attention layers seen.
        length_B: Cached tokens of each request after the pass, int32; made once for all layers.
        recent_start_B: First position of each request's recent segment, int32.
        prefill_seconds: Wall time of step 0.
        decode_seconds: Wall time of the steps from 1 on.
    """

    policy: Policy
    observer: Observer
    cache: KVCache
    stop_ids: frozenset[int] = frozenset()
    requests: list[SparseState] = field(init=False)
    segments: dict[int, PackedSegment] = field(default_factory=dict)
    tails: dict[int, torch.Tensor] = field(default_factory=dict)
    paths: Counter[str] = field(default_factory=Counter)
    forward: Forward | None = None
    layers: set[int] = field(default_factory=set)
    length_B: torch.Tensor = field(init=False)
    recent_start_B: torch.Tensor = field(init=False)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    _began: float = field(default_factory=time.perf_counter)
    _recorded: bool = True

    def __post_init__(self) -> None:
        """Start with empty requests."""
        self.requests = [SparseState() for _ in range(self.cache.batch)]

    @property
    def done(self) -> bool:
        """Whether every request met a stop token."""
        return all(state.finished for state in self.requests)

    def begin_prefill(self, count: list[int], *, final: bool) -> None:
        """Enter a forward pass over `count` prompt tokens of each request.

        The last one is step 0: dense by nature, and slow (g_0 = 1).
        """
        start = [state.length for state in self.requests]
        self._enter(Forward(decode=False, final=final, start=start, count=count))
        for state, new in zip(self.requests, count, strict=True):
            if final:
                state.begin(slow=True, reason="first", new_tokens=new)
                state.prompt_tokens = state.length - len(state.tokens)
                self._move_recent(state)
            else:
                state.length += new
        self._describe()

    @property
    def recorded(self) -> bool:
        """Whether the tokens of the last step have been noted already."""
        return self._recorded

    def begin_decode(self) -> None:
        """Enter the step whose input is x_{t-1}, noted by `record`, under the policy's plan."""
        assert self._recorded, "the last step's tokens have been noted"
        plan = self.policy.plan(StepContext(self.requests))
        start = [state.length for state in self.requests]
        count = [0 if state.finished else 1 for state in self.requests]
        self._enter(Forward(decode=True, final=False, start=start, count=count))
        for row, state in enumerate(self.requests):
            if not state.finished:
                state.begin(slow=plan.slow_B[row], reason=plan.reason_B[row], new_tokens=1)
                self._move_recent(state)
        self._describe()

    def append(self, layer: int, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> LayerPages:
        """Put the pass's new keys and values of a layer into the cache."""
        assert self.forward is not None, "a forward pass has begun"
        self.cache.grow(max(self.forward.length))
        self.layers.add(layer)
        start, count = self.forward.start, self.forward.count
        return self.cache.append(layer, key_BHTD, value_BHTE, start, count)

    def record(self, token_B: list[int]) -> None:
        """Note the tokens x_t that the step generated, and tell the observer."""
        elapsed = time.perf_counter() - self._began
        if self.forward is not None and not self.forward.decode:
            self.prefill_seconds += elapsed
        else:
            self.decode_seconds += elapsed
        for row, (state, token) in enumerate(zip(self.requests, token_B, strict=True)):
            if state.finished:
                continue
            state.finish_step(token)
            state.finished = token in self.stop_ids
            attended = self._attended(state)
            if state.step > 0:
                state.attended += attended
                state.context += state.length
            self.observer.on_step(
                StepEvent(
                    request=row,
                    step=state.step,
                    position=state.length - 1,
                    token_id=token,
                    slow=state.slow,
                    reason=state.reason,
                    steps_since_slow=state.steps_since_slow,
                    attended_tokens=attended,
                    context_tokens=state.length,
                    elapsed_us=elapsed * 1e6,
                )
            )
        self._recorded = True

    def segment(self, layer: int) -> PackedSegment:
        """Return a layer's packed segment, allocated once for the whole run."""
        if layer not in self.segments:
            config = self.policy.config
            selects = self.policy.selects_before or self.policy.selects_after
            rows = config.sink + (min(config.budget, self.cache.capacity) if selects else 0)
            pages = self.cache.layers[layer]
            self.segments[layer] = PackedSegment(self.cache.batch, rows, pages)
        return self.segments[layer]

    def _enter(self, forward: Forward) -> None:
        if self._recorded:  # otherwise an earlier piece of the prompt is still being timed
            self._began = time.perf_counter()
        self._recorded = False
        self.forward = forward

    def _describe(self) -> None:
        starts = [state.recent_start for state in self.requests]
        self.length_B = torch.tensor([state.length for state in self.requests], dtype=torch.int32)
        self.recent_start_B = torch.tensor(starts, dtype=torch.int32)

    def _move_recent(self, state: SparseState) -> None:
        config = self.policy.config
        state.move_recent(config.sink, config.recent, sliding=config.recent_mode == "sliding")

    def _attended(self, state: SparseState) -> float:
        if state.slow:
            return state.length
        dense = len(self.layers & set(self.policy.config.dense_layers))
        fast = state.packed_tokens + state.length - state.recent_start
        return (dense * state.length + (len(self.layers) - dense) * fast) / max(1, len(self.layers))
