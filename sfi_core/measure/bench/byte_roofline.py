"""Memory and upper bounds of speed for a model on a machine, computed from bytes; nothing runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from sfi_core.engine.lossless.rule import best_length
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.shapes import layer_shapes
from sfi_core.machine.describe import describe_measured
from sfi_core.machine.memory import total_bytes
from sfi_core.machine.versions import versions
from sfi_core.measure.bench.settings import LOSSLESS, DecodeSettings, Point
from sfi_core.measure.kernel_bench.timing import clock_for, copy_gb_per_s
from sfi_core.models.byte_model import ByteModel, cycle_mean, cycle_tokens, fast_tokens
from sfi_core.models.describe import ModelWeights, describe_model
from sfi_core.models.memory_need import CPU_SLACK, forecast, largest_batch
from sfi_core.policies import policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.side_stream import ring_places

POLICIES = ("full-kv", "sfi", "streaming-llm")
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
        ConfigError: The forecast does not know a policy: its bytes depend on more than the slow rate.
        UnsupportedModelError: The shapes of the model's layers are unknown without weights.
    """
    for policy in settings.policies:
        if policy not in POLICIES:
            raise ConfigError(f"forecast knows the policies {POLICIES}, got {policy!r}")
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
        self._rate: Fraction = settings.slow_rate

    def rows(self, policy: str, point: Point, bandwidth_gb_per_s: float, memory: int) -> list[dict[str, Any]]:
        """Return the row of a policy at a point and, if asked for, the row of its lossless run."""
        context, batch = point.context, point.batch
        bytes_, rate = self._byte_model(batch), self.slow_rate(policy)
        together = 1 - (1 - rate) ** batch if policy == "sfi" else rate
        dense = batch * float(bytes_.dense(context))
        fast, slow = (batch * each for each in self._steps(policy, point, rate))
        mean, synchronized = ((1 - p) * fast + p * slow for p in (rate, together))
        parts = self._memory(policy, context, batch)
        row = {
            "policy": policy,
            "context": context,
            "batch": batch,
            "slow_rate": rate,
            **parts,
            "fits": parts["memory_bytes"] <= memory,
            "largest_batch": largest_batch(
                lambda count: self._memory(policy, context, count)["memory_bytes"], MOST_REQUESTS, memory
            ),
            "weight_bytes_per_step": self.weights.read(batch),
            "fast_bytes_per_step": None if policy == "full-kv" else round(fast),
            "slow_bytes_per_step": None if policy == "streaming-llm" else round(slow),
            "bytes_per_step": round(mean),
            "roofline_tokens_per_second": bandwidth_gb_per_s * 1e9 * batch / mean,
            "roofline_speedup": dense / mean,
            "synchronized_roofline_speedup": dense / synchronized,
            "break_even_context": self._break_even(policy),
        }
        if not self.settings.lossless:
            return [row]
        rows = [{**row, "lossless": False, **dict.fromkeys(DRAFTING)}]
        if policy_class(policy).drafts:
            other = self._lossless(policy, point, bandwidth_gb_per_s)
            rows.append({**row, "policy": LOSSLESS.format(policy), "lossless": True, **other})
        return rows

    def cycle(self, policy: str, point: Point) -> Cycle:
        """Return the mean cycle of a request in a policy's lossless run.

        A draft ends before a stated slow step, at `draft.max_tokens`, and with `draft.adaptive` at the length
        that the engine chooses for this acceptance. The shorter last draft of a sentence is not counted.
        """
        config, acceptance = self.settings.config.draft, self.settings.acceptance or 0.0
        most = config.max_tokens
        if policy == "sfi" and self._rate:
            most = min(most, int(1 / self._rate) - 1)  # of a fraction: exact
        if config.adaptive and most:
            fast, slow = self._steps(policy, point, 1 / (most + 1))
            most = best_length(acceptance, min(1.0, fast / slow), most)
        again = 1 - acceptance**most if policy == "sfi" else 0.0
        return Cycle(most, cycle_tokens(acceptance, most), again)

    def _lossless(self, policy: str, point: Point, bandwidth_gb_per_s: float) -> dict[str, Any]:
        cycle, batch = self.cycle(policy, point), point.batch
        drafts, tokens, again = cycle.drafts, cycle.tokens, cycle.again
        # an anchored recent window grows with the drafts
        fast, slow = self._steps(policy, point, 1 / (drafts + 1))
        mean = float(cycle_mean(fast, slow, drafted=drafts, tokens=tokens, again=again))
        return {
            "slow_rate": (1 + again) / (drafts + 1 + again),
            "fast_bytes_per_step": round(batch * fast),
            "slow_bytes_per_step": round(batch * slow),
            "bytes_per_step": round(batch * mean),
            "roofline_tokens_per_second": bandwidth_gb_per_s * 1e9 / mean,
            "roofline_speedup": float(self._byte_model(batch).dense(point.context)) / mean,
            "synchronized_roofline_speedup": None,
            "break_even_context": None,
            "stated_acceptance": self.settings.acceptance,
            "drafts": drafts,
            "tokens_per_verification": tokens,
            "passes_per_token": (drafts + 1 + again) / (tokens + again),
        }

    def slow_rate(self, policy: str) -> float:
        """Return a policy's share of slow steps."""
        return {"full-kv": 1.0, "streaming-llm": 0.0}.get(policy, float(self._rate))

    def _byte_model(self, batch: int) -> ByteModel:
        description = {**self.description, "weight_bytes": self.weights.read(batch)}
        dense_layers = self.settings.config.dense_layers
        return ByteModel.of(description, dense_layers=dense_layers, batch=batch)

    def _steps(self, policy: str, point: Point, rate: float) -> tuple[float, float]:
        # bytes of a request's fast and slow step, with its share of the weights; `rate` is the share of slow
        # steps: an anchored recent window is longer at a lower rate
        model, context, config = self._byte_model(point.batch), point.context, self.settings.config
        adapted, selected = policy_class(policy).adapt(config), selected_tokens(config, policy)
        packed = min(context, config.sink + selected)
        read = min(context, fast_tokens(adapted, selected, rate))
        slow = model.slow(context, packed) if policy == "sfi" else model.dense(context)
        return float(model.fast(context, read)), float(slow)

    def _memory(self, policy: str, context: int, batch: int) -> dict[str, int]:
        # all weights count, also those of experts that a step does not read
        moves = any(shape.hosted for shape in self.shapes)
        wanted = self.settings.engine.graphs is not False and self.settings.engine.backend != "torch"
        expected = forecast(
            self.model, self.shapes, self.settings.config, selects=policy == "sfi", batch=batch,
            prompt_tokens=1, capacity=self.settings.capacity(context),
            refreshed_together=batch if self.device.type == "cuda" else 1,
            evidence_buffers=ring_places(self.device, overlap=self.settings.engine.overlap),
            graphs=self.device.type == "cuda" and wanted and not moves,
        )  # fmt: skip
        slack = CPU_SLACK if self.device.type == "cpu" else 1
        expected = replace(
            expected, resident_bytes=self.weights.total_bytes, workspace_bytes=expected.workspace_bytes * slack
        )
        return {
            "memory_bytes": expected.total_bytes,
            "kv_bytes": expected.kv_bytes + expected.norm_bytes + expected.sliding_bytes,
            "packed_bytes": expected.packed_bytes + expected.summary_bytes,
            "workspace_bytes": expected.workspace_bytes + expected.graph_bytes,
        }

    def _break_even(self, policy: str) -> int | None:
        if policy == "full-kv":
            return None
        config, rate = policy_class(policy).adapt(self.settings.config), self.slow_rate(policy)
        selected = selected_tokens(config, policy)
        read = fast_tokens(config, selected, rate)
        context = self._byte_model(1).break_even(read, config.sink + selected, rate)
        return None if context is None else int(context) + 1


def selected_tokens(config: SfiConfig, policy: str) -> int:
    """Return the selected tokens of a policy of `POLICIES`."""
    return config.budget if policy == "sfi" else 0
