"""What the decoding steps of a run share when they run as CUDA graphs: buffers that stay where they are."""

from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch

from sfi_core.engine.forward import Rows, bucket, describe_again, plan, work_room
from sfi_core.policies.base import Policy, Selection
from sfi_core.state.kv_cache import KVCache
from sfi_kernels.step_descriptor import IDLE, SLOW, StepDescriptor, StepRequest, describe_step


class Requests(Protocol):
    """Says what a descriptor has to say of the requests of a step."""

    def __call__(self, *, dense: bool) -> list[StepRequest]:
        """Return it; `dense` makes every request slow."""


@dataclass(slots=True)
class FixedStep:
    """Descriptors whose buffers every step writes anew, and what the step's layers leave.

    Attributes:
        cache: The run's cache; its pages are allocated for all the run.
        policy: The run's policy.
        device: Where they are.
        descriptor: The last step.
        dense: The same for layers left dense; None without such.
        launched: Whether the step under way was launched before it began.
        rows: The slow requests, as the layers read them; None for a step that refreshes nothing.
        selections: What the layers selected, by layer.
    """

    cache: KVCache
    policy: Policy
    device: torch.device
    descriptor: StepDescriptor
    dense: StepDescriptor | None
    launched: bool = False
    rows: Rows | None = None
    selections: dict[int, Selection] = field(default_factory=dict)
    _written: list[StepRequest] = field(default_factory=list)
    _ahead: bool = False

    @classmethod
    def of(cls, cache: KVCache, policy: Policy, device: torch.device) -> Self:
        """Allocate the descriptors."""
        idle = StepRequest(mode=IDLE, length=0, recent_start=0, packed=0, sink=0, count=0)

        def empty() -> StepDescriptor:
            made = describe_step([idle] * cache.batch, work_room(cache, device), device)
            return StepDescriptor(made.buffer, cache.batch, (), (), cache.capacity)

        return cls(cache, policy, device, empty(), empty() if policy.config.dense_layers else None)

    @property
    def refreshes(self) -> int:
        """Rows that the step's layers refresh, padding included."""
        return self.descriptor.slow_rows if self.policy.selects_after else 0

    @property
    def places(self) -> dict[int, int]:
        """The slow requests' rows in what the step's layers leave, by request."""
        return {request: place for place, request in enumerate(self.descriptor.slow)}

    def key(self, requests: list[StepRequest]) -> int:
        """Return the `refreshes` of a step of these requests."""
        slow = sum(request.mode == SLOW for request in requests)
        return bucket(slow, self.descriptor.batch) if self.policy.selects_after else 0

    def enter(self, known: Requests) -> tuple[StepDescriptor, StepDescriptor | None]:
        """Describe the step that begins, unless it was described ahead, as it turned out to be.

        A request that has stopped since then runs along, and nobody looks.
        """
        requests = known(dense=False)
        self.launched = self._ahead and all(
            new == old or new.mode == IDLE for new, old in zip(requests, self._written, strict=True)
        )
        self._ahead = False
        if not self.launched:
            self.write(known)
        dense = None if self.dense is None else _narrowed(self.dense, requests)
        return _narrowed(self.descriptor, requests), dense

    def write(self, known: Requests, *, ahead: bool = False) -> None:
        """Describe a step, which may not have begun."""
        self._written, self._ahead = known(dense=False), ahead
        self.descriptor = describe_again(self._written, self.descriptor)
        if self.dense is not None:
            self.dense = describe_again(known(dense=True), self.dense)

    def begin(self) -> None:
        """Do on the device what a step does once for all layers."""
        self.selections = {}
        for step in (self.descriptor, self.dense):
            if step is not None:
                plan(step, self.cache, self.device)
        self.rows = None
        if self.refreshes:
            sink, table_BP = self.policy.config.sink, self.cache.block_table_BP
            self.rows = Rows.of_slow(sink, self.descriptor, table_BP)


def _narrowed(step: StepDescriptor, requests: list[StepRequest]) -> StepDescriptor:
    # without those who have stopped since
    slow, fast = (
        tuple(row for row in rows if requests[row].mode != IDLE) for rows in (step.slow, step.fast)
    )
    return replace(step, slow=slow, fast=fast)
