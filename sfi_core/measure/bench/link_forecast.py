"""What to expect of a two-tier cache: host memory behind a link, a budget on the device. Nothing runs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from sfi_core.errors import ConfigError
from sfi_core.measure.bench import link_traffic
from sfi_core.measure.bench.forecast import Expectation, document_of, step_bytes
from sfi_core.measure.bench.link import Link, Traffic, step_time
from sfi_core.measure.bench.link_traffic import Rows
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.models.forecast import largest_batch
from sfi_core.models.two_tier_forecast import TwoTierBytes, two_tier_bytes
from sfi_core.policies.page_bounds import extremes_bytes
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import PAGE_SIZE

POLICIES = ("sfi", "snapkv", "quest", "freekv", "synckv", "full-kv", "streaming-llm")
SELECTING = ("sfi", "snapkv", "quest", "freekv", "synckv")
MOST_TOKENS = 1 << 26
NOTES = (
    "nothing was run: a step takes its device bytes' time, then the link's time that is not hidden",
    "host GB is the whole cache; hidden is the share of the link's time that passes beside device time",
    "largest context is the device's; - where only host memory bounds the context",
    "x full-kv is over full attention with its whole cache on the device, whether that fits or not",
)


def link_forecast_document(
    model: Any,
    settings: DecodeSettings,
    device: torch.device,
    link: Link,
    *,
    bandwidth_gb_per_s: float | None = None,
    memory_bytes: float | None = None,
) -> dict[str, Any]:
    """Compute memory, bytes, times and speed of a two-tier cache, for every policy and point.

    Args:
        model: A model on the meta device; see `empty_model`.
        settings: Policies, contexts, batches, slow rate, and what the policies run with.
        device: The device whose bandwidth and memory count where no others are given.
        link: The link to host memory.
        bandwidth_gb_per_s: Bandwidth of device memory; None measures the device's copy bandwidth.
        memory_bytes: Memory of the device; None is the device's.

    Raises:
        ConfigError: A policy has no byte rule here.
        UnsupportedModelError: The model does not show its shapes without weights.
    """
    for policy in settings.policies:
        if policy not in POLICIES:
            raise ConfigError(f"forecast over a link knows the policies {POLICIES}, got {policy!r}")
    expected = LinkExpectation(model, settings, device, link)
    assumed = link.assumed
    stated = (
        f"assumed: a recall brings {assumed.turnover:.3g} of the selected rows anew (forecast.turnover), and "
        f"FreeKV corrects {assumed.corrected:.3g} of the heads (forecast.corrected); a run would tell"
    )
    document = document_of(expected, (stated, *NOTES), bandwidth_gb_per_s, memory_bytes)
    document["link"] = {"gb_per_s": link.gb_per_s, **asdict(assumed)}
    return document


class LinkExpectation(Expectation):
    """A model in bytes, whose cache lies in host memory behind a link."""

    selecting = SELECTING

    def __init__(
        self, model: Any, settings: DecodeSettings, device: torch.device, link: Link
    ) -> None:
        super().__init__(model, settings, device)
        self._link = link

    def row(
        self, policy: str, context: int, batch: int, bandwidth_gb_per_s: float, memory: int
    ) -> dict[str, Any]:
        """Return what to expect of a policy at a point."""
        traffic = self.traffic(policy, context, batch)
        time = step_time(traffic, batch, bandwidth_gb_per_s, self._link.gb_per_s)
        resident = batch * float(self.byte_model(batch).dense(context)) / bandwidth_gb_per_s / 1e6
        tiers = self.two_tiers(policy, context, batch)
        needed = self._device_memory(policy, batch)
        return {
            "policy": policy,
            "context": context,
            "batch": batch,
            "slow_rate": self.slow_rate(policy) if policy in ("sfi", "full-kv") else 0.0,
            "memory_bytes": needed(context),
            "kv_device_bytes": tiers.device_bytes,
            "kv_host_bytes": tiers.host_bytes,
            "fits": needed(context) <= memory,
            "largest_context": _largest_context(needed, memory),
            "bytes_per_step": round(batch * traffic.device_bytes),
            "link_bytes_per_step": round(batch * traffic.link_bytes),
            "device_ms": time.device_ms,
            "link_ms": time.link_ms,
            "hidden_share": time.hidden_ms / time.link_ms if time.link_ms else None,
            "step_ms": time.step_ms,
            "roofline_tokens_per_second": 1000 * batch / time.step_ms,
            "speedup_over_resident": resident / time.step_ms,
        }

    @property
    def graphs(self) -> bool:
        """Whether the run would replay its steps: not where pages come and go."""
        return False

    def traffic(self, policy: str, context: int, batch: int) -> Traffic:
        """Return the bytes of a mean step of a request."""
        config, assumed = self.settings.config, self._link.assumed
        rows = rows_of(config, policy, context)
        model = self.byte_model(batch, self.dense_layers(policy))
        if policy == "freekv":
            return link_traffic.freekv(model, rows, config.freekv.page, assumed)
        if policy == "quest":
            return link_traffic.quest(model, rows, config.baseline.page, assumed)
        if policy == "synckv":
            return link_traffic.synckv(
                model,
                rows,
                assumed,
                representatives=link_traffic.share_of_heads(
                    [self.shapes[index] for index in self._tiered(policy)],
                    config.synckv.representatives,
                ),
                stride=config.synckv.stride,
                static=config.synckv.static,
                sparse_suspension=config.synckv.suspension == "sparse",
            )
        if policy == "sfi":
            rate = self.slow_rate(policy)
            fast, slow = step_bytes(model, config, policy, context, rate)
            return link_traffic.sfi(model, rows, fast, slow, rate)
        if policy == "full-kv":
            return link_traffic.streamed(model, rows)
        return link_traffic.resident(model, rows)

    def two_tiers(self, policy: str, context: int, batch: int) -> TwoTierBytes:
        """Return the bytes of the cache on both sides of the link."""
        config, dense = self.settings.config, self.dense_layers(policy)
        pages = {"quest": config.baseline.page, "freekv": config.freekv.page}
        kept = config.synckv.representatives if policy == "synckv" else 0
        return two_tier_bytes(
            self.shapes,
            config.replace(dense_layers=tuple(dense)),
            batch=batch,
            capacity=self.settings.capacity(context),
            page=PAGE_SIZE,
            longest_recent=self._longest_recent(policy),
            selects=policy in SELECTING,
            norms=policy != "full-kv",  # it cannot run over the store, and would need none
            summary=partial(extremes_bytes, page=pages[policy]) if policy in pages else None,
            resident=lambda layer, heads: range(heads if layer in dense else min(kept, heads)),
        )

    def dense_layers(self, policy: str) -> Sequence[int]:
        """Return the layers left dense: the config's, and FreeKV's first (FreeKV, Sec. 5.1)."""
        config = self.settings.config
        full = [index for index, shape in enumerate(self.shapes) if shape.window is None]
        first = policy == "freekv" and config.freekv.first_layer_dense
        return sorted({*config.dense_layers, *(full[:1] if first else ())})

    def _tiered(self, policy: str) -> list[int]:
        dense = self.dense_layers(policy)
        return [i for i, shape in enumerate(self.shapes) if shape.window is None and i not in dense]

    def _longest_recent(self, policy: str) -> int:
        config, steps = self.settings.config, self.settings.total_steps
        if policy == "streaming-llm":
            return config.recent + config.budget
        if policy == "snapkv":
            return config.recent + steps
        if policy == "sfi" and config.recent_mode == "anchored":
            return config.recent + (min(steps, round(1 / self._rate)) if self._rate else steps)
        return config.recent

    def _device_memory(self, policy: str, batch: int) -> Callable[[int], int]:
        def needed(context: int) -> int:
            one = self.memory(policy, context, batch)
            cache = self.two_tiers(policy, context, batch).device_bytes
            return one.total_bytes - one.kv_bytes - one.norm_bytes - one.packed_bytes + cache

        return needed


def _largest_context(needed: Callable[[int], int], memory: int) -> int | None:
    # None where the device does not bound the context
    most = largest_batch(needed, MOST_TOKENS, memory)
    return None if most == MOST_TOKENS else most


def rows_of(config: SfiConfig, policy: str, context: int) -> Rows:
    """Return the tokens of a policy's step; StreamingLLM's budget makes its recent window longer."""
    kept = config.sink + config.recent + (config.budget if policy == "streaming-llm" else 0)
    return Rows(context=context, kept=kept, selected=config.budget if policy in SELECTING else 0)
