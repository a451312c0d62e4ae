"""Events of the workers' layers, on their way to the observer on the scheduler's side."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from sfi_core.hosts.vllm.names import KVConnectorWorkerMetadata
from sfi_core.observers.events import AuditEvent, Event, SelectionEvent
from sfi_core.observers.observer import NullObserver

LayerEvent = SelectionEvent | AuditEvent


class Gathered(NullObserver):
    """Keeps one worker's selections and audits until the scheduler's side takes them."""

    def __init__(self) -> None:
        self._told: list[LayerEvent] = []

    def on_selection(self, event: SelectionEvent) -> None:
        """Keep the event."""
        self._told.append(event)

    def on_audit(self, event: AuditEvent) -> None:
        """Keep the event."""
        self._told.append(event)

    def take(self) -> list[LayerEvent]:
        """Return the events since the last call, on the host; this waits for the device."""
        told, self._told = self._told, []
        return [on_host(event) for event in told]


@dataclass
class WorkerEvents(KVConnectorWorkerMetadata):
    """The events of one engine step by tensor-parallel rank, all on the host."""

    by_rank: dict[int, list[LayerEvent]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add another worker's events."""
        self.by_rank |= other.by_rank
        return self

    def joined(self) -> list[Event]:
        """Return the events with the KV heads of all ranks, in the order of the ranks."""
        found: dict[tuple[Any, ...], list[LayerEvent]] = defaultdict(list)
        for rank in sorted(self.by_rank):
            for event in self.by_rank[rank]:
                found[type(event), event.request, event.step, event.layer].append(event)
        return [side_by_side(events) for events in found.values()]


def on_host(event: LayerEvent) -> LayerEvent:
    """Copy an event's tensors to the host."""
    changes: dict[str, Any] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.cpu()
    if isinstance(event, SelectionEvent):
        changes["diagnostics"] = {name: one.cpu() for name, one in event.diagnostics.items()}
    return replace(event, **changes)


def side_by_side(events: Sequence[LayerEvent]) -> LayerEvent:
    """Join the ranks' events of one request, step and layer: concatenate their KV heads."""
    first = events[0]
    if len(events) == 1:
        return first
    changes: dict[str, Any] = {}
    for field in fields(first):
        values = [getattr(event, field.name) for event in events]
        if isinstance(values[0], torch.Tensor):
            changes[field.name] = torch.cat(values)
    if isinstance(first, AuditEvent):
        changes["heads"] = tuple(range(len(first.heads) * len(events)))
    else:
        each = [event.diagnostics for event in events if isinstance(event, SelectionEvent)]
        changes["diagnostics"] = {name: torch.cat([one[name].flatten() for one in each]) for name in first.diagnostics}
    return replace(first, **changes)
