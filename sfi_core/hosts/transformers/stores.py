"""The two-tier KV store of a run under a device budget."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from sfi_core.engine.maintenance import first_together, worked_off_together
from sfi_core.engine.run import reads_in_place
from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.hosts.transformers.lossless import drafting_of
from sfi_core.machine.memory import free_bytes
from sfi_core.models import two_tier_memory as two_tier
from sfi_core.models.memory_need import Forecast, forecast
from sfi_core.policies import POLICIES, EvidencePolicy, Policy, policy_class
from sfi_core.settings.engine import DeviceBudget, EngineOptions
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.side_stream import ring_places, side_of
from sfi_core.state.two_tier import TwoTierStore

TILE = 16  # tokens that a page of the Triton kernels is a multiple of


class TierPlan:
    """The division of keys and values between host and device, under a device budget.

    Raise `ConfigError` if the budget is no share or size, the policy reads the whole cache on the device, or
    the recent window is shorter than a page.
    """

    def __init__(self, budget: str, policy: Policy, name: str, shapes: Sequence[LayerShape], page: int) -> None:
        self.budget = DeviceBudget.parse(budget)
        self.policy, self.shapes, self.page = policy, shapes, page
        check_offloads(policy, name)
        if policy.config.recent < page:
            raise ConfigError(
                f"recent must be at least a page of {page} tokens under kv_device_budget, got "
                f"{policy.config.recent}; lower engine.kv_page"
            )

    def longest_recent(self, generated: int) -> int:
        """Return the most recent tokens that a step reads, for a run that generates so many."""
        config, fast = self.policy.config, self.policy.most_fast_steps
        grows = 0
        if config.recent_mode == "anchored":
            grows = generated if fast is None else min(fast, generated)
        return config.recent + grows + 1

    def bytes(self, batch: int, capacity: int, generated: int, *, resident: bool = False) -> two_tier.TwoTierBytes:
        """Add up the bytes of a run, with or without the heads that stay on the device if there is room."""
        return two_tier.two_tier_bytes(
            self.shapes,
            self.policy.config,
            longest_recent=self.longest_recent(generated),
            resident=self.policy.resident_heads if resident else None,
            **self._sizes(batch, capacity),
        )

    def store(self, batch: int, capacity: int, generated: int, backend: str, device: torch.device) -> TwoTierStore:
        """Make the store.

        Raise `ConfigError` for a budget that is too small, `BackendError` for a page that is no multiple of a
        tile under Triton, and `MemoryForecastError` if the host's memory is too small.
        """
        if backend == "triton" and self.page % TILE:
            raise BackendError(
                f"engine.kv_page must be a multiple of {TILE} tokens under the triton backend, got {self.page}"
            )
        expected, sizes = self.bytes(batch, capacity, generated), self._sizes(batch, capacity)
        config = self.policy.config
        least = two_tier.two_tier_bytes(self.shapes, config, longest_recent=config.recent, **sizes)
        two_tier.check_device_budget(self.budget, expected, least.device_bytes)
        free = free_bytes(torch.device("cpu"))
        if free is not None and expected.host_bytes > free:
            raise MemoryForecastError(
                f"host memory must hold the whole cache, {expected.host_bytes / 1e9:.2f} GB, got "
                f"{free / 1e9:.2f} GB free; lower the batch or max_new_tokens"
            )
        more = self.bytes(batch, capacity, generated, resident=True).device_bytes
        fits = more <= self.budget.bytes_of(expected.host_bytes)
        return TwoTierStore(
            batch, capacity, page_size=self.page,
            ring_pages=two_tier.ring_pages(self.longest_recent(generated), self.page), backend=backend,
            side=side_of(device, overlap=True, role="tiers"),
            resident=self.policy.resident_heads if fits else None,
        )  # fmt: skip

    def _sizes(self, batch: int, capacity: int) -> dict[str, Any]:
        policy = self.policy
        return {
            "batch": batch,
            "capacity": capacity,
            "page": self.page,
            "selects": policy.selects,
            "summary": policy.summary_bytes,
        }


def check_offloads(policy: Policy | type[Policy], name: str) -> None:
    """Raise `ConfigError` for a policy that cannot run over two tiers; the message lists those that can."""
    if not policy.offloads:
        able = ", ".join(sorted(known for known, kind in POLICIES.items() if kind.offloads))
        raise ConfigError(f"policy {name} cannot run under kv_device_budget; those that can: {able}")


def engine_for(policy: str, engine: EngineOptions) -> EngineOptions:
    """Return the options for a policy in a comparison, without those that it cannot run under.

    Full attention then has its cache on the device: that is what a method in two tiers has to beat.
    """
    kind = policy_class(policy)
    budget = engine.kv_device_budget if kind.offloads else None
    return replace(engine, kv_device_budget=budget, lossless=engine.lossless and kind.drafts)


def expect(
    session: Any,
    batch: int,
    prompt_tokens: int,
    capacity: int,
    prefill_chunk: int = 0,
    generated: int | None = None,
    graphs: bool = False,
) -> Forecast:
    """Forecast the memory of a session's run, with the shapes that a pass over two tokens shows.

    `generated` are the most tokens that a request generates; None for what `capacity` leaves.
    """
    model, policy, tiers, shapes = session.model, session.policy, session.tiers, session.shapes()
    page = session.page_size or 1
    capacity = -(-capacity // page) * page
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    together = session.backend == "triton"  # a slow step refreshes all requests at once
    joins = isinstance(policy, EvidencePolicy) and tiers is None
    logits = heads * policy.config.window_prefill * capacity  # of a prompt's first selection
    own = [policy.first_bytes(shape) for shape in shapes if shape.window is None]
    first = max((each for each in own if each is not None), default=None)
    joined = worked_off_together(heads * capacity, len(shapes)) if joins else 1
    expected = forecast(
        model, shapes, policy.config, selects=policy.selects, summary=policy.summary_bytes, batch=batch,
        prompt_tokens=prompt_tokens, capacity=capacity, prefill_chunk=prefill_chunk,
        refreshed_together=batch if together else joined,
        first_bytes=first, first_together=min(batch, first_together(logits)) if together and first is None else 1,
        unpacked=() if together else policy.config.dense_layers,
        packs=tiers is not None or not reads_in_place(policy, session.backend),
        evidence_buffers=ring_places(model.device, overlap=session.engine.overlap), graphs=graphs,
        drafting=drafting_of(session),
    )  # fmt: skip
    if tiers is None:
        return expected
    tiered = tiers.bytes(batch, capacity, generated or capacity - prompt_tokens)
    host = tiered.host_bytes if model.device.type == "cpu" else 0  # both tiers in one memory
    packed, norms = tiered.parts["packed"], tiered.parts["norms"]
    others = tiered.device_bytes - packed - norms
    return replace(expected, kv_bytes=host + others, packed_bytes=packed, summary_bytes=0, norm_bytes=norms)
