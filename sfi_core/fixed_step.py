"""What the decoding steps of a run share when they run as CUDA graphs: buffers that stay where they are."""

from dataclasses import dataclass, field
from typing import Protocol, Self

import torch

from sfi_core.describe import Rows, plan, work_room
from sfi_core.kv_cache import KVCache
from sfi_core.policies.base import Policy, Selection
from sfi_kernels.step_descriptor import IDLE, StepDescriptor, StepRequest, describe_step


class Describe(Protocol):
    """Writes the step under way over a descriptor's buffer."""

    def __call__(self, known: StepDescriptor, *, dense: bool) -> StepDescriptor:
        """Return it, with the lists of the slow requests padded."""


@dataclass(slots=True)
class FixedStep:
    """Descriptors whose buffers every step writes anew, and what the step's layers leave.

    Attributes:
        cache: The run's cache; its pages are allocated for all the run.
        policy: The run's policy.
        device: Where they are.
        descriptor: The last step.
        dense: The same for layers left dense; None without such.
        rows: The slow requests, as the layers read them; None for a step that refreshes nothing.
        selections: What the layers selected, by layer.
    """

    cache: KVCache
    policy: Policy
    device: torch.device
    descriptor: StepDescriptor
    dense: StepDescriptor | None
    rows: Rows | None = None
    selections: dict[int, Selection] = field(default_factory=dict)

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

    def renew(self, describe: Describe) -> tuple[StepDescriptor, StepDescriptor | None]:
        """Describe the next step."""
        self.descriptor = describe(self.descriptor, dense=False)
        if self.dense is not None:
            self.dense = describe(self.dense, dense=True)
        return self.descriptor, self.dense

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
