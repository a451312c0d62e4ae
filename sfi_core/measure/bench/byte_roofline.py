"""Memory and upper bounds of speed for a model on a machine, computed from bytes; nothing runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sfi_core.engine.lossless import best_length
from sfi_core.hosts.transformers.shapes import layer_shapes
from sfi_core.machine.memory import describe_measured, total_bytes
from sfi_core.machine.versions import versions
from sfi_core.measure.bench.settings import LOSSLESS, DecodeSettings, Point
from sfi_core.measure.kernel_bench.timing import clock_for, copy_gb_per_s
from sfi_core.models.describe import ModelWeights, describe_model
from sfi_core.sizes.memory import CPU_SLACK, forecast, largest_batch
from sfi_core.sizes.policy import PolicyReads
from sfi_core.sizes.step import ByteModel, cycle_mean, cycle_tokens
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.side_stream import ring_places

MOST_REQUESTS = 1 << 16
NOTES = (
    "nothing was run: tokens/s is bandwidth over bytes, which no implementation exceeds",
    "synchronized: every request is slow as soon as one is, and each is slow at random",
)
LOSSLESS_NOTE = (
    "lossless: acceptance is stated, {:g} for each tested token; a verification reads as much as a slow "
    "step; the mean is of a token of each request"
)
DRAFTING = ("stated_acceptance", "drafts", "tokens_per_verification", "passes_per_token")


@dataclass(frozen=True, slots=True)
class Cycle:
    """A draft of a lossless run and its verification, on average.

    Attributes:
        drafts: Tokens drafted before a verification.
        tokens: Tokens that the verification gives.
        again: Share of the verifications that a slow step of the corrected token follows, which selects.
    """

    drafts: int
    tokens: float
    again: float


def forecast_document(
    model: Any,
    settings: DecodeSettings,
    device: torch.device,
    *,
    bandwidth_gb_per_s: float | None = None,
    memory_bytes: float | None = None,
) -> dict[str, Any]:
    """Compute memory, bytes and the largest speed for every policy and point.

    Args:
        model: A model on the meta device; see `empty_model`.
        settings: The settings of the benchmark, with a stated slow rate and acceptance.
        device: The device to forecast for.
        bandwidth_gb_per_s: Bandwidth; None measures the device's copy bandwidth.
        memory_bytes: Memory; None is the device's.

    Raises:
        ConfigError: A policy lacks a setting, such as synckv's file of heads.
        UnsupportedModelError: The shapes of the model's layers are unknown without weights.
    """
    expected = Expectation(model, settings, device)
    if bandwidth_gb_per_s is None:
        bandwidth_gb_per_s = copy_gb_per_s(device, clock_for(device, "torch"))
    memory = int((total_bytes(device) or 0) if memory_bytes is None else memory_bytes)
    drafted = (LOSSLESS_NOTE.format(settings.acceptance),) if settings.lossless else ()
    return {
        "rows": [
            row
            for point in settings.points()
            for policy in dict.fromkeys(settings.policies)
            for row in expected.rows(policy, point, bandwidth_gb_per_s, memory)
        ],
        "forecast": True,
        "notes": [*NOTES, *drafted],
        "model": {**expected.description, "total_weight_bytes": expected.weights.total_bytes},
        "settings": {"slow_rate": str(settings.slow_rate), "config": settings.config.to_dict()},
        "machine": {**describe_measured(device), "bandwidth_gb_per_s": bandwidth_gb_per_s, "memory_bytes": memory},
        "versions": versions(),
    }


class Expectation:
    """Computes rows for a model on the meta device, under the settings of a benchmark."""

    def __init__(self, model: Any, settings: DecodeSettings, device: torch.device) -> None:
        assert settings.slow_rate is not None, "a forecast has a stated rate"
        self.model, self.settings, self.device = model, settings, device
        self.shapes: Sequence[LayerShape] = layer_shapes(model)
        self.weights = ModelWeights.of(model)
        self.description = describe_model(model, self.shapes)
        self.reads = {
            name: PolicyReads.of(name, settings.config, self.shapes, float(settings.slow_rate))
            for name in settings.policies
        }

    def rows(self, policy: str, point: Point, bandwidth_gb_per_s: float, memory: int) -> list[dict[str, Any]]:
        """Return the row of a policy at a point and, if asked for, the row of its lossless run."""
        context, batch, reads = point.context, point.batch, self.reads[policy]
        model, rate = self._byte_model(reads, batch), reads.rate
        # the trigger makes each request slow by itself, a policy's own plan all at once
        together = rate if reads.stated is None else 1 - (1 - rate) ** batch
        dense = batch * float(model.dense(context))
        fast, slow = (batch * size for size in reads.steps(model, context))
        mean, synchronized = ((1 - p) * fast + p * slow for p in (rate, together))
        parts = self._memory(reads, context, batch)
        row = {
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
            "fast_bytes_per_step": round(fast) if reads.has_fast else None,
            "slow_bytes_per_step": round(slow) if reads.has_slow else None,
            "bytes_per_step": round(mean),
            "roofline_tokens_per_second": bandwidth_gb_per_s * 1e9 * batch / mean,
            "roofline_speedup": dense / mean,
            "synchronized_roofline_speedup": dense / synchronized,
            "break_even_context": reads.break_even(self._byte_model(reads, 1)) if reads.has_fast else None,
        }
        if not self.settings.lossless:
            return [row]
        rows = [{**row, "lossless": False, **dict.fromkeys(DRAFTING)}]
        if reads.policy.drafts:
            other = self._lossless(policy, point, bandwidth_gb_per_s)
            rows.append({**row, "policy": LOSSLESS.format(policy), "lossless": True, **other})
        return rows

    def cycle(self, policy: str, point: Point) -> Cycle:
        """Return the mean cycle of a request in a policy's lossless run.

        A draft ends before a stated slow step, at `draft.max_tokens`, and with `draft.adaptive` at the length
        that the engine chooses for this acceptance. The shorter last draft of a sentence is not counted.
        """
        config, acceptance = self.settings.config.draft, self.settings.acceptance or 0.0
        most, reads = config.max_tokens, self.reads[policy]
        if reads.stated and self.settings.slow_rate:
            most = min(most, int(1 / self.settings.slow_rate) - 1)  # of a fraction: exact
        if config.adaptive and most:
            model = self._byte_model(reads, point.batch)
            fast, slow = reads.steps(model, point.context, 1 / (most + 1))
            most = best_length(acceptance, min(1.0, fast / slow), most)
        again = 1 - acceptance**most if reads.policy.refreshes() else 0.0
        return Cycle(most, cycle_tokens(acceptance, most), again)

    def _lossless(self, policy: str, point: Point, bandwidth_gb_per_s: float) -> dict[str, Any]:
        cycle, batch, reads = self.cycle(policy, point), point.batch, self.reads[policy]
        drafts, tokens, again = cycle.drafts, cycle.tokens, cycle.again
        model = self._byte_model(reads, batch)
        # an anchored recent window grows with the drafts
        fast, slow = reads.steps(model, point.context, 1 / (drafts + 1))
        mean = float(cycle_mean(fast, slow, drafted=drafts, tokens=tokens, again=again))
        return {
            "slow_rate": (1 + again) / (drafts + 1 + again),
            "fast_bytes_per_step": round(batch * fast),
            "slow_bytes_per_step": round(batch * slow),
            "bytes_per_step": round(batch * mean),
            "roofline_tokens_per_second": bandwidth_gb_per_s * 1e9 / mean,
            "roofline_speedup": float(model.dense(point.context)) / mean,
            "synchronized_roofline_speedup": None,
            "break_even_context": None,
            "stated_acceptance": self.settings.acceptance,
            "drafts": drafts,
            "tokens_per_verification": tokens,
            "passes_per_token": (drafts + 1 + again) / (tokens + again),
        }

    def _byte_model(self, reads: PolicyReads, batch: int) -> ByteModel:
        description = {**self.description, "weight_bytes": self.weights.read(batch)}
        return ByteModel.of(description, dense_layers=reads.policy.config.dense_layers, batch=batch)

    def _memory(self, reads: PolicyReads, context: int, batch: int) -> dict[str, int]:
        # all weights count, also those of experts that a step does not read
        cuda, engine = self.device.type == "cuda", self.settings.engine
        backend = ("triton" if cuda else "torch") if engine.backend == "auto" else engine.backend
        moves = any(shape.hosted for shape in self.shapes)
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
