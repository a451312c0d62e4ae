"""What goes from the workers to the scheduler's side and out: events of layers, and the server's counts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch

from sfi_core.hosts.vllm.names import KVConnectorPromMetrics, KVConnectorStats, KVConnectorWorkerMetadata
from sfi_core.hosts.vllm.planner import TOTALS, Planner
from sfi_core.observers.events import AuditEvent, Event, SelectionEvent
from sfi_core.observers.observer import NullObserver

LayerEvent = SelectionEvent | AuditEvent


class Gathered(NullObserver):
    """Keeps one worker's selections and audits until the scheduler's side takes them."""

    def __init__(self) -> None:
        self._events: list[LayerEvent] = []

    def on_selection(self, event: LayerEvent) -> None:
        """Keep the event."""
        self._events.append(event)

    on_audit = on_selection

    def take(self) -> list[LayerEvent]:
        """Return the events since the last call, on the host; this waits for the device."""
        events, self._events = self._events, []
        return [on_host(event) for event in events]


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
        by_layer: dict[tuple[Any, ...], list[LayerEvent]] = defaultdict(list)
        for rank in sorted(self.by_rank):
            for event in self.by_rank[rank]:
                by_layer[type(event), event.request, event.step, event.layer].append(event)
        return [side_by_side(events) for events in by_layer.values()]


def on_host(event: LayerEvent) -> LayerEvent:
    """Copy an event's tensors to the host."""
    changes: dict[str, Any] = {}
    for field in fields(event):
        value = getattr(event, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.cpu()
    if isinstance(event, SelectionEvent):
        changes["diagnostics"] = {name: tensor.cpu() for name, tensor in event.diagnostics.items()}
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
        ranks = [event.diagnostics for event in events if isinstance(event, SelectionEvent)]
        changes["diagnostics"] = {
            name: torch.cat([tensors[name].flatten() for tensors in ranks]) for name in first.diagnostics
        }
    return replace(first, **changes)


class ServerStats(KVConnectorStats):
    """Counts since the last report, by the names of `TOTALS`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        self._reported: dict[str, float] = {}

    def since(self, planner: Planner) -> "ServerStats":
        """Return a planner's counts since the last call."""
        new = {name: value - self._reported.get(name, 0) for name, value in planner.totals.items()}
        self._reported = dict(planner.totals)
        return ServerStats(new)

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "ServerStats":
        """Add another's counts."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts for vLLM's log line."""
        attended, context, chosen = (self.data.get(name, 0) for name in ("attended", "context", "selection"))
        attended, chosen = (attended / context, chosen / context) if context else (1.0, 0.0)
        counts = {f"sfi_{name}": int(self.data.get(name, 0)) for name in [*TOTALS][:4]}
        return counts | {"sfi_read_ratio": round(attended, 4), "sfi_cache_read_ratio": round(attended + chosen, 4)}

    def is_empty(self) -> bool:
        """Say whether all counts are 0."""
        return not any(self.data.values())


class SfiMetrics(KVConnectorPromMetrics):
    """Counters `vllm:sfi_<name>` for Prometheus, by engine."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, Any]) -> None:
        super().__init__(config, types, labels, values)
        self._counters = {}
        for name, meaning in TOTALS.items():
            counter = self._counter_cls(name=f"vllm:sfi_{name}", documentation=meaning, labelnames=labels)
            self._counters[name] = {engine: counter.labels(*label) for engine, label in values.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counts."""
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(value)
