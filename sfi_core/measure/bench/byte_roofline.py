"""Memory and upper bounds of speed for a model on a machine, computed from bytes; nothing runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sfi_core.hosts.transformers.shapes import layer_shapes
from sfi_core.machine.memory import describe_measured, total_bytes
from sfi_core.machine.versions import versions
from sfi_core.measure.bench.settings import DecodeSettings, Point
from sfi_core.measure.kernel_bench.timing import clock_for, copy_gb_per_s
from sfi_core.models.describe import ModelWeights, describe_model
from sfi_core.sizes.memory import CPU_SLACK, forecast, largest_batch
from sfi_core.sizes.policy import PolicyReads
from sfi_core.sizes.step import ByteModel
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.side_stream import ring_places

MOST_REQUESTS = 1 << 16


def forecast_document(
    model: Any,
    settings: DecodeSettings,
    device: torch.device,
    *,
    bandwidth_gb_per_s: float | None = None,
    memory_bytes: float | None = None,
) -> dict[str, Any]:
    """Compute memory, bytes and the largest speed for every policy and point.

    `model` is on the meta device (`empty_model`), `device` the one to forecast for. Without a bandwidth its copy
    bandwidth is measured. Raise `ConfigError` if a policy lacks a setting, such as synckv's file of heads, and
    `UnsupportedModelError` if the shapes of the model's layers are unknown without weights.
    """
    expected = Expectation(model, settings, device)
    if bandwidth_gb_per_s is None:
        bandwidth_gb_per_s = copy_gb_per_s(device, clock_for(device, "torch"))
    memory = int((total_bytes(device) or 0) if memory_bytes is None else memory_bytes)
    return {
        "rows": [
            expected.row(policy, point, bandwidth_gb_per_s, memory)
            for point in settings.points()
            for policy in dict.fromkeys(settings.policies)
        ],
        "forecast": True,
        "notes": ["nothing was run: tokens/s is bandwidth over bytes, which no implementation exceeds"],
        "model": {**expected.description, "total_weight_bytes": expected.weights.total_bytes},
        "settings": {"slow_rate": str(settings.slow_rate), "config": settings.config.to_dict()},
        "machine": {**describe_measured(device), "bandwidth_gb_per_s": bandwidth_gb_per_s, "memory_bytes": memory},
        "versions": versions(),
    }


class Expectation:
    """Computes rows for a model on the meta device, under the settings of a benchmark."""

    def __init__(self, model: Any, settings: DecodeSettings, device: torch.device) -> None:
        self.model, self.settings, self.device = model, settings, device
        self.shapes: Sequence[LayerShape] = layer_shapes(model)
        self.weights = ModelWeights.of(model)
        self.description = describe_model(model, self.shapes)
        self.reads = {
            name: PolicyReads.of(name, settings.config, self.shapes, float(settings.slow_rate))
            for name in settings.policies
        }

    def row(self, policy: str, point: Point, bandwidth_gb_per_s: float, memory: int) -> dict[str, Any]:
        """Return the row of a policy at a point."""
        context, batch, reads = point.context, point.batch, self.reads[policy]
        model, rate = self._byte_model(reads, batch), reads.rate
        dense = batch * float(model.dense(context))
        fast, slow = (batch * size for size in reads.steps(model, context))
        mean = (1 - rate) * fast + rate * slow
        parts = self._memory(reads, context, batch)
        has_fast, has_slow = reads.stated or rate < 1, reads.stated or rate > 0
        return {
            "policy": policy,
            "context": context,
            "batch": batch,
            "slow_rate": rate,
            **parts,
            "fits": parts["memory_bytes"] <= memory,
            "largest_batch": largest_batch(
                lambda count: self._memory(reads, context, count)["memory_bytes"], MOST_REQUESTS, memory
            ),
            "weight_bytes_per_step": self.weights.read(batch),
            "fast_bytes_per_step": round(fast) if has_fast else None,
            "slow_bytes_per_step": round(slow) if has_slow else None,
            "bytes_per_step": round(mean),
            "roofline_tokens_per_second": bandwidth_gb_per_s * 1e9 * batch / mean,
            "roofline_speedup": dense / mean,
            "break_even_context": reads.break_even(self._byte_model(reads, 1)) if has_fast else None,
        }

    def _byte_model(self, reads: PolicyReads, batch: int) -> ByteModel:
        description = {**self.description, "weight_bytes": self.weights.read(batch)}
        return ByteModel.of(description, dense_layers=reads.policy.config.dense_layers, batch=batch)

    def _memory(self, reads: PolicyReads, context: int, batch: int) -> dict[str, int]:
        # all weights count, also those of experts that a step does not read
        cuda, engine = self.device.type == "cuda", self.settings.engine
        backend = ("triton" if cuda else "torch") if engine.backend == "auto" else engine.backend
        moves = any(shape.state_bytes for shape in self.shapes)
        expected = forecast(
            self.model, self.shapes, reads.policy, batch=batch, prompt_tokens=1,
            capacity=self.settings.capacity(context), backend=backend, refreshed_together=batch if cuda else 1,
            evidence_buffers=ring_places(self.device, overlap=engine.overlap),
            graphs=cuda and engine.graphs is not False and backend != "torch" and not moves,
        )  # fmt: skip
        slack = 1 if cuda else CPU_SLACK
        expected = replace(
            expected, resident_bytes=self.weights.total_bytes, workspace_bytes=expected.workspace_bytes * slack
        )
        return {
            "memory_bytes": expected.total_bytes,
            "kv_bytes": expected.kv_bytes + expected.norm_bytes + expected.sliding_bytes,
            "packed_bytes": expected.packed_bytes + expected.summary_bytes,
            "workspace_bytes": expected.workspace_bytes + expected.graph_bytes,
        }
