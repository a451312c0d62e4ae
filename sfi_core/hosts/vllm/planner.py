"""Plan each engine step from the requests' tokens: which requests are slow, and their slots.

The scheduler's side runs it, so that all workers get the same plan. Plain numbers, no vLLM. With
asynchronous scheduling a step's token may be known one step late; the plan then uses the known tokens, which
`trigger_delay` of 1 allows.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sfi_core.engine.ledger import Reads, RequestPass, close_step, enter, plan_step, step_fields, step_shape
from sfi_core.engine.report import RequestReport
from sfi_core.hosts.serving.plan import NO_SLOT, Entry, Plan
from sfi_core.hosts.vllm.settings import RequestSettings
from sfi_core.observers.observer import NullObserver, Observer
from sfi_core.policies.base import Policy
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import AuditConfig
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import FAST, PROMPT, SLOW

# what `sfi generate --json` says of a request too
SHARED = (
    "prompt_tokens", "slow_steps", "fast_steps", "slow_at", "reasons",
    "mean_attended_tokens", "mean_selection_tokens", "read_ratio", "selection_ratio", "cache_read_ratio",
    "stored_ratio",
)  # fmt: skip


@dataclass(slots=True)
class Tracked:
    """One request from its arrival to its end.

    vLLM's request is `live`; its `num_tokens` and `output_token_ids` grow as tokens become known. `begun` says whether
    its prompt has been read; `preempted` counts how often it lost its blocks. `due` is the reason of a slow step that
    has `waited` for steps, because others took the room for evidence. `pending` are steps whose token is not known yet,
    each with the fields that its engine step's requests share, which are filled in later.
    """

    live: Any
    settings: RequestSettings
    policy: Policy
    state: RequestState
    slot: int = NO_SLOT
    begun: bool = False
    blocks: list[int] = field(default_factory=list)
    pending: deque[tuple[Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=deque)
    preempted: int = 0
    due: str = ""
    waited: int = 0

    def report(self) -> dict[str, Any]:
        """Return the report in the request's answer, plain values."""
        shared = RequestReport.of(self.state, frozenset(), evicts=self.policy.evicts)
        counts: dict[str, Any] = {name: getattr(shared, name) for name in SHARED}
        counts |= {"preempted": self.preempted, "dense_steps": shared.reasons.get("dense", 0)}
        return {**counts, "error": self.settings.error} if self.settings.error else counts


TOTALS = {  # the server's counters, and what `/metrics` says of them
    "slow_steps": "Decoding steps, prompts' last included, that attended to everything.",
    "fast_steps": "Decoding steps that attended to sink, selected and recent tokens.",
    "dense_steps": "Those of the slow steps whose request had no slot.",
    "requests": "Requests that have ended.",
    "attended": "Cached tokens that decoding steps attended to, the mean over KV heads and layers.",
    "context": "Cached tokens that full attention would have read in these steps.",
    "selection": "What choosing read in these steps, in cached tokens' worth.",
}


class Planner:
    """Tracks every request from its arrival to its end.

    `free` are the slots that no request has, `totals` counts since the server's last report. `step` is the engine's,
    from 0 on; `shape` are the fields of `StepEvent` that all requests of the last planned step share. `row_bytes` are
    those of a token in all full-attention layers; None leaves bytes out of events.
    """

    def __init__(
        self,
        make_policy: Callable[[SfiConfig], Policy],
        *,
        slots: int,
        block: int,
        layers: int,
        evidence: int | None = None,
        observer: Observer | None = None,
        audit: AuditConfig | None = None,
    ) -> None:
        """Allow `slots` sparse requests; `block` are a cache block's tokens, `layers` the full-attention ones.

        At most `evidence` rows of a token select anew in a step; None for any number.
        """
        self._make_policy, self._block, self._audit = make_policy, block, audit
        self._evidence = evidence
        self._layers, self._dense_layers = layers, 0
        self._observer = observer or NullObserver()
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

    def plan(self, scheduled: Any, group: int = 0) -> Plan:
        """Plan an engine step from vLLM's `SchedulerOutput`; `group` is the KV cache group of full attention."""
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self.step += 1
        for tracked in self.tracked.values():
            self._note(tracked, elapsed)
        for name in filter(self.tracked.__contains__, scheduled.preempted_req_ids or ()):  # others were aborted since
            self._lose(self.tracked[name])
        opened = {new.req_id: (new.block_ids[group], new.num_computed_tokens) for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                opened[name] = blocks[group], computed
            elif blocks is not None and name in self.tracked:
                self.tracked[name].blocks += blocks[group]
        counts = {name: count for name, count in scheduled.num_scheduled_tokens.items() if name in self.tracked}
        for name in filter(opened.__contains__, counts):
            self._open(self.tracked[name], *opened[name])
        entries, self.shape = [], {}
        kinds: tuple[list[RequestState], list[RequestState]] = [], []
        for name, (request_pass, selects) in self._passes(counts).items():
            tracked = self.tracked[name]
            entries.append(self._enter(tracked, request_pass, selects=selects, opens=name in opened))
            kinds[request_pass.kind == FAST].append(tracked.state)
        self.shape |= step_shape(*kinds, None if self.row_bytes is None else self._moved_bytes)
        freed, self._freed = self._freed, []
        return Plan(entries, freed)

    def _moved_bytes(self, state: RequestState) -> float:
        return (self.row_bytes or 0) * state.attended(self._layers, self._dense_layers)

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
        tracked.due, tracked.waited = "", 0
        tracked.blocks, state = list(blocks), tracked.state
        # prompts are read whole, what was generated before a preemption too
        state.length, state.step, state.slow = computed, len(state.tokens) - 1, True

    def _passes(self, counts: Mapping[str, int]) -> dict[str, tuple[RequestPass, bool]]:
        # what each request does in the step, and whether it selects anew: a prompt that ends does, others take turns
        passes = {name: self._pass(self.tracked[name], count) for name, count in counts.items()}
        selecting = [name for name in passes if self._asks(self.tracked[name], passes[name])]
        if self._evidence is not None:
            due = (name for name in selecting if not passes[name].ends_prompt)
            for name in sorted(due, key=lambda name: -self.tracked[name].waited)[self._evidence :]:
                selecting.remove(name)
                tracked = self.tracked[name]
                tracked.due, tracked.waited = passes[name].reason, tracked.waited + 1
                passes[name] = RequestPass.decode("")
        for name in selecting:
            self.tracked[name].due, self.tracked[name].waited = "", 0
        return {name: (request_pass, name in selecting) for name, request_pass in passes.items()}

    def _pass(self, tracked: Tracked, count: int) -> RequestPass:
        state = tracked.state
        if not tracked.begun:
            reason, ends = "resumed" if state.tokens else "first", state.length + count == tracked.live.num_tokens
            return RequestPass(PROMPT, count, reason, ends)
        if tracked.slot == NO_SLOT:
            return RequestPass.decode("dense")
        return RequestPass.decode(tracked.due) if tracked.due else plan_step(tracked.policy, [state])[0]

    def _asks(self, tracked: Tracked, request_pass: RequestPass) -> bool:
        policy = tracked.policy
        asks = policy.selects_after if request_pass.ends_prompt else request_pass.kind == SLOW and policy.refreshes()
        return tracked.slot != NO_SLOT and asks

    def _enter(self, tracked: Tracked, request_pass: RequestPass, *, selects: bool, opens: bool) -> Entry:
        state, start = tracked.state, tracked.state.length
        enter(state, request_pass, tracked.policy)
        if request_pass.generates:
            tracked.begun = True
            self._step(tracked)
        return Entry(
            request=state.request,
            slot=tracked.slot,
            start=start,
            block=tracked.blocks[(state.length - 1) // self._block],
            request_pass=request_pass,
            step=state.step if request_pass.generates else state.step + 1,
            opens=opens and tracked.slot != NO_SLOT,
            generated=len(state.tokens) if opens else 0,
            selects=selects,
        )

    def _step(self, tracked: Tracked) -> None:
        # what the workers will have packed by the end of the step is known here
        state, policy, config = tracked.state, tracked.policy, tracked.policy.config
        if policy.selects_after if state.slow else policy.chooses:
            state.note_packed(config.sink, config.budget)
        elif state.slow:
            state.note_packed(config.sink, 0)
        audit = None if tracked.slot == NO_SLOT else self._audit
        reads = Reads.of(state, policy, self._layers, self._dense_layers)
        tracked.pending.append((step_fields(state, self.step, reads, audit), self.shape))

    def _note(self, tracked: Tracked, elapsed: float) -> None:
        # the tokens that have become known, each with the step that made it
        state, known = tracked.state, tracked.live.output_token_ids
        for token in list(known[len(state.tokens) :]):
            if not tracked.pending:
                state.tokens.append(token)
                continue
            fields, shape = tracked.pending.popleft()
            event = close_step(fields, state, token, elapsed_us=elapsed * 1e6, **shape)
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
