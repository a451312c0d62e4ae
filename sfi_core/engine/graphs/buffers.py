"""The buffers at fixed addresses that a run's CUDA graphs read and write; and which step they will describe next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from sfi_core.engine.batch_pass import Descriptors, Requests, Rows, known_requests
from sfi_core.engine.ledger import RequestPass, enter, plan_step
from sfi_core.engine.run import Run
from sfi_core.policies.base import Policy, Selection
from sfi_core.state.kv_store import Recall
from sfi_core.state.request import RequestState
from sfi_kernels.step_descriptor import IDLE, SLOW, StepDescriptor, StepRequest, describe_step

Selections = dict[tuple[int, ...], list[Selection]]  # by the layers that selected together
Recalls = list[tuple[tuple[int, ...], Recall]]  # of layers, whose requests follow each other in `rows_RH`


class Kind(NamedTuple):
    """A kind of steps that one graph serves: tokens of a request, rows to refresh, whether any row chooses."""

    queries: int = 1
    refreshes: int = 0
    chooses: bool = False


@dataclass(slots=True, kw_only=True)
class StepBuffers(Descriptors):
    """Step descriptors in buffers that every step overwrites, and the layers' results.

    The store's pages are allocated for the whole run. A step decodes at most `most` tokens of a request. `descriptor`
    and `dense`, for `dense_layers`, are the last step's, described `ahead` if it has not begun. `rows` are the slow
    requests, None for a step that refreshes nothing. By layer, `selections`
    has what was selected, `recalls` what that brought from the host, and `queries`, for an audit, the last step's,
    [B, H, G, D].
    """

    policy: Policy
    most: int
    descriptor: StepDescriptor = field(init=False)
    dense: StepDescriptor | None = None
    ahead: bool = False
    rows: Rows | None = None
    selections: Selections = field(default_factory=dict)
    recalls: Recalls = field(default_factory=list)
    queries: dict[int, torch.Tensor] | None = None
    _written: list[StepRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Allocate the descriptors."""
        self.descriptor = self._idle()
        if self.policy.config.dense_layers:
            self.dense = self._idle()

    def _idle(self) -> StepDescriptor:
        idle = StepRequest(mode=IDLE, length=0, recent_start=0, packed=0, sink=0, count=0)
        step = describe_step([idle] * self.store.batch, self._work_room(), self.device)
        return StepDescriptor(step.buffer, self.store.batch, (), (), self.store.capacity)

    @property
    def refreshes(self) -> int:
        """Rows that the step refreshes, padding included."""
        return self.descriptor.slow_rows if self.policy.refreshes() else 0

    @property
    def kind(self) -> Kind:
        """What decides which kernels the step launches, whatever the requests' lengths."""
        step = self.descriptor
        return Kind(step.queries, self.refreshes, chooses=self.policy.chooses and bool(step.fast))

    @property
    def places(self) -> dict[int, int]:
        """By row in the batch, the slow requests' rows in `selections`."""
        return {request: place for place, request in enumerate(self.descriptor.slow)}

    def describe(self, known: Requests) -> tuple[StepDescriptor, StepDescriptor | None]:
        """Describe the step that begins, unless `write` described it ahead, up to requests that have stopped since."""
        requests = known.requests
        self.launched = self.ahead and all(
            new == old or new.mode == IDLE for new, old in zip(requests, self._written, strict=True)
        )
        self.ahead = False
        if not self.launched:
            self.write(known)
        dense = None if self.dense is None else _narrowed(self.dense, requests)
        return _narrowed(self.descriptor, requests), dense

    def write(self, known: Requests, *, ahead: bool = False) -> None:
        """Describe a step; `ahead` if it has not begun."""
        self._written, self.ahead = known.requests, ahead
        self.descriptor = describe_again(self._written, self.descriptor, self.most)
        if self.dense is not None and known.dense is not None:
            self.dense = describe_again(known.dense, self.dense, self.most)

    def keep(self, layer: int, query_BHGD: torch.Tensor) -> None:
        """Keep a layer's query for the audit, in a buffer that all graphs write."""
        if self.queries is not None:
            if layer not in self.queries:  # not inside a capture: a recorder first runs the work unrecorded
                self.queries[layer] = torch.empty_like(query_BHGD)
            self.queries[layer].copy_(query_BHGD)

    def keep_recall(self, layer: int, recall: Recall | None) -> None:
        """Keep what a layer's selection brings from the host."""
        if recall is not None:
            self.recalls.append(((layer,), recall))

    def end(self) -> None:
        """Join the recalls of layers whose rows have one size, once they have arrived."""
        alike: dict[int, Recalls] = {}
        for layers, recall in self.recalls:
            alike.setdefault(recall.row_bytes, []).append((layers, recall))
        self.recalls = []
        for size, recalls in alike.items():
            joined = Recall(torch.cat([part.rows_RH for _, part in recalls]), size, 0.0, lambda job: job())
            self.recalls.append((tuple(layer for layers, _ in recalls for layer in layers), joined))

    def begin(self) -> None:
        """Do the device's work that a step does once for all layers."""
        self.selections, self.recalls = {}, []
        self.windows.clear()
        for step in (self.descriptor, self.dense):
            if step is not None:
                self._plan(step)
        sink, table_BP = self.policy.config.sink, self.store.block_table_BP
        self.rows = Rows.of_slow(sink, self.descriptor, table_BP) if self.refreshes else None
        if self.kind.chooses and not self.store.whole_on_device:
            self.chosen = Rows.of_fast(sink, self.descriptor, table_BP)


def describe_again(requests: Sequence[StepRequest], known: StepDescriptor, most: int) -> StepDescriptor:
    """Write a decoding step's descriptor over `known`, lists and drafts padded to powers of two, without a plan."""
    step = describe_step(requests, known.work_XI.shape[0], known.buffer.device, known.buffer)
    padding = bucket(len(step.slow), step.batch) - len(step.slow)
    queries = 1 + bucket(step.queries - 1, most - 1)
    return replace(step, longest=known.longest, padding=padding, queries=queries)


def bucket(count: int, most: int) -> int:
    """Round `count` up to a power of two, at most `most`."""
    return min(most, 1 << (count - 1).bit_length()) if count else 0


def _narrowed(step: StepDescriptor, requests: list[StepRequest]) -> StepDescriptor:
    # leave out the requests that have stopped since the step was described
    slow, fast = (tuple(row for row in rows if requests[row].mode != IDLE) for rows in (step.slow, step.fast))
    return replace(step, slow=slow, fast=fast)


def foresee(run: Run) -> tuple[Requests, list[RequestState]] | None:
    """Foresee the next step and its states, if no request stops or joins; None if tokens, audit or room forbid it.

    Also None for a step that cannot be done twice, because it overwrites the packed rows that it reads: a mixed slow
    one, and one that packs the next step's rows.
    """
    if tokens_decide(run):
        return None
    states = [replace(state) for state in run.requests]
    passes = plan_step(run.policy, states)
    slow = any(request.kind == SLOW for request in passes)
    if _audited(run, passes) or (run.policy.mixes_heads and slow) or run.packs_ahead:
        return None
    for state, request in zip(states, passes, strict=True):
        enter(state, request, run.policy)
    if max(state.length for state in states) > run.store.capacity:
        return None
    return known_requests(passes, states, run.policy), states


def audits_next(run: Run) -> bool:
    """Say whether the next step is audited for any request: such a step is not replayed."""
    return run.audit is not None and _audited(run, plan_step(run.policy, run.requests))


def _audited(run: Run, passes: Sequence[RequestPass]) -> bool:
    audit = run.audit
    return audit is not None and any(
        audit.due(state.step + 1, slow=request.kind == SLOW)
        for state, request in zip(run.requests, passes, strict=True)
        if request.generates
    )


def tokens_decide(run: Run) -> bool:
    """Say whether a step's input tokens decide if it is slow."""
    config = run.policy.config
    return config.trigger_policy == "boundary" and config.trigger_delay == 0
