"""Plan each engine step from the requests' tokens: which requests are slow, and their slots.

The scheduler's side runs it, so that all workers get the same plan. Plain numbers, no vLLM. With
asynchronous scheduling a step's token may be known one step late; the plan then uses the known tokens, which
`trigger_delay` of 1 allows.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sfi_core.engine.ledger import OpenStep, Reads, RequestPass, enter, plan_step, step_shape
from sfi_core.hosts.vllm.entry import NO_SLOT, Entry, Plan
from sfi_core.hosts.vllm.request_settings import RequestSettings
from sfi_core.hosts.vllm.tracked import Tracked
from sfi_core.observers.observer import NullObserver, Observer
from sfi_core.policies.base import Policy
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import FAST, PROMPT

TOTALS = ("slow_steps", "fast_steps", "dense_steps", "requests", "attended", "context", "selection")


@dataclass(frozen=True, slots=True)
class Scheduled:
    """vLLM's schedule of one engine step: new tokens by request, and what changes in the cache.

    `opened` has the requests that begin or begin again, with their blocks and the tokens already in the
    cache; `blocks` the new blocks of the others. `preempted` requests have lost their blocks.
    """

    count: Mapping[str, int]
    opened: Mapping[str, tuple[Sequence[int], int]]
    blocks: Mapping[str, Sequence[int]]
    preempted: Sequence[str]


class Planner:
    """Tracks every request from its arrival to its end.

    `tracked` has the requests by name, `free` the slots that no request has, `totals` counts over all
    requests, which only grow. `step` is the engine's, from 0 on; `shape` are the fields of `StepEvent` that
    all requests of the last planned step share. `row_bytes` are those of a token's keys and values in all
    full-attention layers; None leaves bytes out of events.
    """

    def __init__(
        self,
        make_policy: Callable[[SfiConfig], Policy],
        *,
        slots: int,
        block: int,
        layers: int,
        observer: Observer | None = None,
        audit: AuditConfig | None = None,
    ) -> None:
        """Start without requests.

        At most `slots` requests are sparse at once; `block` are the tokens of a cache block, `layers` the
        full-attention layers; `audit` says which steps the workers audit.
        """
        self._make_policy, self._block = make_policy, block
        self._layers, self._observer = layers, observer or NullObserver()
        self._dense_layers = 0
        self._audit = audit
        self.tracked: dict[str, Tracked] = {}
        self.free = list(range(slots))[::-1]
        self.totals: dict[str, float] = dict.fromkeys(TOTALS, 0)
        self._freed: list[int] = []
        self.row_bytes: int | None = None
        self.shape: dict[str, Any] = {}
        self._arrived, self.step, self._since = 0, -1, time.perf_counter()

    def see(self, live: Any, settings: RequestSettings) -> None:
        """Register a request that has arrived."""
        if live.request_id in self.tracked:
            return
        policy, state = self._make_policy(settings.config), RequestState(request=self._arrived)
        self.tracked[live.request_id] = Tracked(live, settings, policy, state)
        self._dense_layers = len(policy.config.dense_layers)  # the same for all requests
        self._arrived += 1

    def plan(self, scheduled: Scheduled) -> Plan:
        """Plan an engine step."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self.step += 1
        for tracked in self.tracked.values():
            self._note(tracked, elapsed)
        for name in scheduled.preempted:
            if name in self.tracked:
                self._lose(self.tracked[name])
        for name, blocks in scheduled.blocks.items():
            if name in self.tracked:
                self.tracked[name].blocks += blocks
        entries, self.shape = [], {}
        for name, count in scheduled.count.items():
            if name in self.tracked:
                opened = scheduled.opened.get(name)
                if opened is not None:
                    self._open(self.tracked[name], *opened)
                entries.append(self._enter(self.tracked[name], count, opens=opened is not None))
        planned = [self.tracked[name] for name in scheduled.count if name in self.tracked]
        self.shape |= self._shape_of(entries, planned)
        freed, self._freed = self._freed, []
        return Plan(entries, freed)

    def finish(self, name: str) -> Tracked | None:
        """Forget a request that has ended or was aborted; return its record, if any."""
        tracked = self.tracked.pop(name, None)
        if tracked is None:
            return None
        self._note(tracked, time.perf_counter() - self._since)
        self._release(tracked)
        self.totals["requests"] += 1
        return tracked

    def _lose(self, tracked: Tracked) -> None:
        # vLLM computes its tokens anew, the generated ones too
        tracked.preempted += 1
        tracked.begun = False
        self._release(tracked)

    def _open(self, tracked: Tracked, blocks: Sequence[int], computed: int) -> None:
        if tracked.begun:  # a model runner may say so only when the request comes back
            self._lose(tracked)
        if tracked.slot == NO_SLOT and tracked.settings.enabled and self.free:
            tracked.slot = self.free.pop()
        tracked.pending.clear()
        tracked.blocks, state = list(blocks), tracked.state
        # prompts are read whole, what was generated before a preemption too
        state.length, state.step, state.slow = computed, len(state.tokens) - 1, True

    def _enter(self, tracked: Tracked, count: int, *, opens: bool) -> Entry:
        state, start = tracked.state, tracked.state.length
        one = self._pass_of(tracked, count)
        enter(state, one, tracked.policy)
        if one.generates:
            tracked.begun = True
            self._step(tracked)
        return Entry(
            request=state.request,
            slot=tracked.slot,
            start=start,
            block=tracked.blocks[(state.length - 1) // self._block],
            one=one,
            step=state.step if one.generates else state.step + 1,
            opens=opens and tracked.slot != NO_SLOT,
            generated=len(state.tokens) if opens else 0,
        )

    def _pass_of(self, tracked: Tracked, count: int) -> RequestPass:
        state = tracked.state
        if not tracked.begun:
            reason = "resumed" if state.tokens else "first"
            return RequestPass(PROMPT, count, reason, state.length + count == tracked.live.num_tokens)
        if tracked.slot == NO_SLOT:
            return RequestPass.decode(slow=True, reason="dense")
        return plan_step(tracked.policy, [state])[0]

    def _step(self, tracked: Tracked) -> None:
        # what the workers will have packed by the end of the step is known here
        state, policy, config = tracked.state, tracked.policy, tracked.policy.config
        if policy.selects_after if state.slow else policy.selects_before:
            state.note_packed(config.sink, config.budget)
        elif state.slow:
            state.note_packed(config.sink, 0)
        audit = None if tracked.slot == NO_SLOT else self._audit
        step = OpenStep.of(state, audit, self.step, self._reads(tracked))
        tracked.pending.append((step, self.shape))

    def _shape_of(self, entries: Sequence[Entry], planned: Sequence[Tracked]) -> dict[str, Any]:
        row_bytes = self.row_bytes

        def moved(state: RequestState) -> float:
            return (row_bytes or 0) * state.attended(self._layers, self._dense_layers)

        kinds: tuple[list[RequestState], list[RequestState]] = [], []
        for entry, tracked in zip(entries, planned, strict=True):
            kinds[entry.one.kind == FAST].append(tracked.state)
        return step_shape(*kinds, None if row_bytes is None else moved)

    def _reads(self, tracked: Tracked) -> Reads:
        return Reads.of(tracked.state, tracked.policy, self._layers, self._dense_layers)

    def _note(self, tracked: Tracked, elapsed: float) -> None:
        # the tokens that have become known, each with the step that made it
        state, known = tracked.state, tracked.live.output_token_ids
        for token in list(known[len(state.tokens) :]):
            if not tracked.pending:
                state.tokens.append(token)
                continue
            step, shape = tracked.pending.popleft()
            event = step.close(state, token, elapsed_us=elapsed * 1e6, **shape)
            if event.step > 0:
                self.totals["attended"] += event.attended_tokens
                self.totals["context"] += event.context_tokens
                self.totals["selection"] += event.selection_tokens
            self.totals["slow_steps" if event.slow else "fast_steps"] += 1
            self.totals["dense_steps"] += event.reason == "dense"
            self._observer.on(event)

    def _release(self, tracked: Tracked) -> None:
        if tracked.slot != NO_SLOT:
            self.free.append(tracked.slot)
            self._freed.append(tracked.slot)
            tracked.slot = NO_SLOT
