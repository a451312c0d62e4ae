"""The plugin's connector with a trace; vLLM finds it by `kv_connector_module_path`.

It is here because `sfi_core` cannot import `sfi_traces`. The scheduler's process writes the trace, with
the events of the planner and of all workers.
"""

from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from sfi_core.hosts.serving.plan import Plan
from sfi_core.hosts.vllm.connector import ServerStats
from sfi_core.hosts.vllm.connector import SfiConnector as PlainConnector
from sfi_core.hosts.vllm.names import backend_of, layer_shapes, tokenizer_of
from sfi_core.hosts.vllm.plugin import installed_version
from sfi_core.hosts.vllm.settings import OWN
from sfi_core.measure.bench.architectures import empty_model
from sfi_core.models.describe import describe_model
from sfi_core.models.load import BUNDLED
from sfi_core.observers.events import BeginStepEvent, PromptEvent, RunEvent
from sfi_core.observers.observer import Observer
from sfi_kernels.step_descriptor import FAST
from sfi_traces.record.parquet import ParquetObserver


class SfiConnector(PlainConnector):
    """The plugin's connector with a trace."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Begin a side, on the scheduler's also the trace; raise `ConfigError` as the plugin's own, or for a folder."""
        self._recorder: ParquetObserver | None = None
        # spans of the steps that the workers run now
        self._steps: deque[AbstractContextManager[None]] = deque()
        super().__init__(vllm_config, role, kv_cache_config)
        if self._recorder is not None:
            shapes = layer_shapes(kv_cache_config, vllm_config)
            self.planner.row_bytes = sum(shape.row_bytes for shape in shapes if shape.window is None)
            self._recorder.on(self._run_event(shapes))

    def make_observer(self) -> Observer:
        """Return the trace's writer on the scheduler's side; a worker gathers its events for it."""
        options = self.settings.options
        if options.trace is None or not self.schedules:
            return super().make_observer()
        self._recorder = ParquetObserver(
            Path(options.trace),
            tokenizer=tokenizer_of(self._vllm_config),
            redact_text=options.trace_redact_text,
            provenance={"preset": options.preset, "server": {"vllm": installed_version(), "slots": self.slots}},
            clock="cpu",  # the scheduler's process does not use the device
        )
        return self._recorder

    def on_new_request(self, request: Any) -> None:
        """Register a new request, and record its prompt."""
        super().on_new_request(request)
        tracked = self.planner.tracked.get(request.request_id)
        if self._recorder is None or tracked is None or request.prompt_token_ids is None:
            return
        ids_BT = torch.tensor([list(request.prompt_token_ids)], dtype=torch.int64)
        config, usual = tracked.settings.config, self.settings.config
        changed = {name: getattr(config, name) for name in OWN if getattr(config, name) != getattr(usual, name)}
        requests, count = (tracked.state.request,), (ids_BT.shape[1],)
        self._recorder.on(PromptEvent(requests=requests, ids_BT=ids_BT, count=count, settings=changed))

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        """Plan an engine step, and record that it begins."""
        plan = super().build_connector_meta(scheduler_output)
        if self._recorder is not None and (entries := plan.entries):
            self._recorder.on(
                BeginStepEvent(
                    step=self.planner.step,
                    slow=tuple(entry.request for entry in entries if entry.request_pass.kind != FAST),
                    fast=tuple(entry.request for entry in entries if entry.request_pass.kind == FAST),
                    reads_prompt=any(not entry.decode for entry in entries),
                )
            )
            span = self._recorder.span("engine step")
            span.__enter__()
            self._steps.append(span)
        return plan

    def get_kv_connector_stats(self) -> ServerStats | None:
        """Return the counts since the last call; vLLM calls this at the end of each engine step."""
        if self._steps:
            self._steps.popleft().__exit__(None, None, None)
        return super().get_kv_connector_stats()

    def shutdown(self) -> None:
        """Finish the trace."""
        if self._recorder is not None:
            self._recorder.close()
        super().shutdown()

    def _run_event(self, shapes: Any) -> RunEvent:
        model, audit = self._vllm_config.model_config, self.settings.audit
        described = describe_model(empty_model(model.hf_config, torch.device("meta"), model.dtype), shapes)
        device = torch.device(self._vllm_config.device_config.device_type)
        return RunEvent(
            batch=0,  # requests come later
            requests=0,
            policy=self.settings.options.policy,
            backend=backend_of(device),
            device=device.type,
            config=self.settings.config.to_dict(),
            trigger_token_ids=tuple(sorted(self.trigger_ids)),
            model={**described, "name": "bundled" if model.model == str(BUNDLED) else model.model},
            audit=None if audit is None else audit.to_dict(),
        )
