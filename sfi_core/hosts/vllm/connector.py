"""A KV connector that moves no KV: it sends the plan from vLLM's scheduler to its workers, and their events back."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics
from vllm.model_executor.models.utils import extract_layer_index

from sfi_core.engine.audit import Audit
from sfi_core.engine.run import Run
from sfi_core.errors import ConfigError
from sfi_core.hosts.serving.plan import Plan
from sfi_core.hosts.serving.rows import EVIDENCE, RowLaunch
from sfi_core.hosts.serving.worker import BorrowedPages, WorkerEngine
from sfi_core.hosts.vllm import names
from sfi_core.hosts.vllm.planner import TOTALS, Planner
from sfi_core.hosts.vllm.settings import RequestSettings, check_host
from sfi_core.observers.events import AuditEvent, Event, SelectionEvent
from sfi_core.observers.observer import NullObserver, Observer
from sfi_core.policies import policy_class
from sfi_core.policies.base import Policy
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions
from sfi_core.triggers.trigger import Trigger

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
        return [side_by_side([event]) for event in events]


@dataclass
class WorkerEvents(base.KVConnectorWorkerMetadata):
    """The events of one engine step by tensor-parallel rank, all on the host."""

    by_rank: dict[int, list[LayerEvent]]

    def aggregate(self, other: base.KVConnectorWorkerMetadata) -> Self:
        """Add another worker's events."""
        self.by_rank |= other.by_rank
        return self

    def joined(self) -> list[Event]:
        """Return the events with the KV heads of all ranks, in the order of the ranks."""
        ranks = [events for _, events in sorted(self.by_rank.items())]
        return [side_by_side(events) for events in zip(*ranks, strict=True)]  # all tell the same in the same order


def side_by_side(events: Sequence[LayerEvent]) -> LayerEvent:
    """Copy the ranks' events of one request, step and layer to the host, as one with the KV heads of all."""
    first, changes = events[0], dict[str, Any]()
    for field in fields(first):
        values = [getattr(event, field.name) for event in events]
        if isinstance(values[0], torch.Tensor):
            changes[field.name] = torch.cat(values).cpu()
        elif isinstance(values[0], dict):  # diagnostics by name
            joined = {name: torch.cat([named[name].flatten() for named in values]) for name in values[0]}
            changes[field.name] = {name: tensor.cpu() for name, tensor in joined.items()}
    if isinstance(first, AuditEvent):
        changes["heads"] = tuple(range(len(first.heads) * len(events)))
    return replace(first, **changes)


class ServerStats(metrics.KVConnectorStats):
    """Counts since the last report, by the names of `TOTALS`."""

    def aggregate(self, other: metrics.KVConnectorStats) -> "ServerStats":
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


class SfiMetrics(metrics.KVConnectorPromMetrics):
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


class SfiConnector(base.KVConnectorBase_V1, base.SupportsHMA):
    """Plans on the scheduler's side; on the worker's side, hands the plan to the attention.

    `engine` is there once vLLM's cache is.
    """

    engine: WorkerEngine
    requires_kv_delivery = False  # no other instance needs the KV
    # counts of another process, and the counters of the server's /metrics
    build_kv_connector_stats, build_prom_metrics = ServerStats, SfiMetrics

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Begin the side that `role` names; raise `ConfigError` if settings or model do not fit."""
        super().__init__(vllm_config, role, kv_cache_config)
        self.settings = names.settings_of(vllm_config)
        self.group, layer_names = names.full_group(kv_cache_config.kv_cache_groups)
        spec = kv_cache_config.kv_cache_groups[self.group].kv_cache_spec
        self.block, self.key_width = int(spec.block_size), int(spec.head_size)
        self.layers = dict(sorted((extract_layer_index(name), name) for name in layer_names))
        self.trigger_ids = names.trigger_ids(vllm_config, self.settings)
        self.slots = names.slot_count(vllm_config, self.settings.options)  # requests that may be sparse at once
        self.schedules = role == base.KVConnectorRole.SCHEDULER
        self.observer = self.make_observer()
        if self.schedules:
            self.planner = Planner(
                self.make_policy,
                slots=self.slots,
                block=self.block,
                layers=len(self.layers),
                evidence=EVIDENCE if names.evidence_of(vllm_config, self.settings, 1) else None,
                observer=self.observer,
                audit=self.settings.audit,
            )

    def make_policy(self, config: SfiConfig) -> Policy:
        """Make the policy for a request's settings."""
        trigger = Trigger(frozenset(self.trigger_ids), config)
        policy = policy_class(self.settings.options.policy)(config, trigger, [*self.layers])
        policy.key_width = self.key_width  # the scheduler's side sees no key
        return policy

    def make_observer(self) -> Observer:
        """Return the side's observer; raise `ConfigError` for a trace, which the command line's connector records."""
        if self.settings.options.trace is None:
            return NullObserver()
        if not self.schedules:
            return Gathered()
        raise ConfigError(
            "trace must come with kv_connector_module_path=sfi_cli.commands.serve_connector, as sfi serve sets it"
        )

    # the scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Say that no tokens come from elsewhere."""
        return 0, False

    def on_new_request(self, request: Any) -> None:
        """Register a request that has arrived."""
        settings = RequestSettings.of(request.sampling_params.extra_args, self.settings.config, self._check)
        self.planner.see(request, settings)
        # keys and values of generated tokens depend on the settings: other settings share no prefix
        salt = settings.salt(self.settings.options.policy)
        request.cache_salt = f"{request.cache_salt} {salt}" if request.cache_salt else salt
        request.block_hashes.clear()
        request.update_block_hashes()

    def _check(self, config: SfiConfig) -> None:
        # of a request's own settings
        check_host(self._vllm_config, config)
        asks = self.make_policy(config).triggered and config.trigger_policy == "boundary"
        if asks and not self.trigger_ids:
            raise ConfigError("sfi.trigger_policy must not be boundary on a server without triggers")

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """Plan an engine step, for the workers."""
        return self.planner.plan(scheduler_output, self.group)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Add a report on the request to its answer's `kv_transfer_params`."""
        ended = self.planner.finish(request.request_id)
        return False, None if ended is None else {"sfi": ended.report()}

    def update_connector_output(self, connector_output: Any) -> None:
        """Pass the workers' events to the observer."""
        gathered = connector_output.kv_connector_worker_meta
        if isinstance(gathered, WorkerEvents):
            for event in gathered.joined():
                self.observer.on(event)

    def get_kv_connector_stats(self) -> ServerStats | None:
        """Return the counts since the last call, on the scheduler's side."""
        if not self.schedules:
            return None
        counts, self.planner.totals = self.planner.totals, dict.fromkeys(TOTALS, 0.0)
        return ServerStats(data=counts)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, *_: Any) -> bool:
        """Say that a graph may hold all layers: none of them calls the connector."""
        return False

    # the worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Borrow the caches of the full-attention layers; allocate their packed segments."""
        modules = self._vllm_config.compilation_config.static_forward_context
        impls = {layer: names.impl_of(modules[name]) for layer, name in self.layers.items()}
        views = {layer: impl.pages(kv_caches[self.layers[layer]]) for layer, impl in impls.items()}
        key, _ = next(iter(views.values()))
        # a kernel may want smaller blocks than vLLM's scheduler gives
        page_size, device, longest = key.shape[2], key.device, self._vllm_config.model_config.max_model_len
        store = BorrowedPages(names.backend_of(device), page_size, self.slots, longest, device)
        for layer, (key, value) in views.items():
            store.borrow(layer, key, value, impls[layer].norm_X)
        audit = self.settings.audit
        run = Run(
            self.make_policy(self.settings.config),
            self.observer,
            store,
            device=device,
            engine=EngineOptions(overlap=False, graphs=False),
            ranks=names.tensor_parallel_ranks(),
            audit=audit,
            watchers=() if audit is None else (Audit(audit),),
        )
        run.layers.update(self.layers)
        run.groups = {layer: impl.num_heads // impl.num_kv_heads for layer, impl in impls.items()}
        run.segments = {layer: impl.segment for layer, impl in impls.items() if impl.segment is not None}
        run.kept = {layer: impl.kept for layer, impl in impls.items() if impl.kept is not None}
        evidence = {layer: impl.evidence for layer, impl in impls.items() if impl.evidence is not None}
        self.engine = WorkerEngine(run, store, RowLaunch(run, evidence), self.block // page_size)
        for impl in impls.values():
            impl.engine = self.engine

    def build_connector_worker_meta(self) -> base.KVConnectorWorkerMetadata | None:
        """Send the events of this worker's layers in the pass, if there is a trace."""
        events = self.observer.take() if isinstance(self.observer, Gathered) else []
        return WorkerEvents({self.engine.run.ranks.number: events}) if events else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take the plan of the next forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self.engine.begin(connector_metadata)

    def wait_for_save(self) -> None:
        """End the forward pass."""
        self.engine.leave()

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        """Move nothing; of the scheduler's allocations `build_connector_meta` is told."""

    wait_for_layer_load = save_kv_layer = update_state_after_alloc = start_load_kv
