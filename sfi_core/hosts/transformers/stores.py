"""The two-tier KV store of a run under a device budget."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.machine.memory import free_bytes
from sfi_core.policies import POLICIES, Policy, policy_class
from sfi_core.settings.engine import DeviceBudget, EngineOptions
from sfi_core.sizes.policy import TwoTierBytes, check_device_budget, ring_pages, two_tier_bytes
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.side_stream import side_of
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

    def bytes(self, batch: int, capacity: int, generated: int | None = None, *, resident: bool = False) -> TwoTierBytes:
        """Add up the bytes of a run, with or without the heads that stay on the device if there is room.

        With None for `generated` the recent window never grows.
        """
        recent = self.policy.config.recent if generated is None else self.longest_recent(generated)
        return two_tier_bytes(
            self.shapes, self.policy, batch=batch, capacity=capacity, page=self.page, longest_recent=recent,
            resident=resident,
        )  # fmt: skip

    def store(self, batch: int, capacity: int, generated: int, backend: str, device: torch.device) -> TwoTierStore:
        """Make the store.

        Raise `ConfigError` for a budget that is too small, `BackendError` for a page that is no multiple of a
        tile under Triton, and `MemoryForecastError` if the host's memory is too small.
        """
        if backend == "triton" and self.page % TILE:
            raise BackendError(
                f"engine.kv_page must be a multiple of {TILE} tokens under the triton backend, got {self.page}"
            )
        expected = self.bytes(batch, capacity, generated)
        check_device_budget(self.budget, expected, self.bytes(batch, capacity).device_bytes)
        free = free_bytes(torch.device("cpu"))
        if free is not None and expected.host_bytes > free:
            raise MemoryForecastError(
                f"host memory must hold the whole cache, {expected.host_bytes / 1e9:.2f} GB, got "
                f"{free / 1e9:.2f} GB free; lower the batch or max_new_tokens"
            )
        more = self.bytes(batch, capacity, generated, resident=True).device_bytes
        fits = more <= self.budget.bytes_of(expected.host_bytes)
        return TwoTierStore(
            batch, capacity, page_size=self.page, ring_pages=ring_pages(self.longest_recent(generated), self.page),
            backend=backend, side=side_of(device, overlap=True, role="tiers"),
            resident=self.policy.resident if fits else None,
        )  # fmt: skip


def check_offloads(policy: Policy | type[Policy], name: str) -> None:
    """Raise `ConfigError` for a policy that cannot run over two tiers; the message lists those that can."""
    if not policy.offloads:
        able = ", ".join(sorted(policy_name for policy_name, kind in POLICIES.items() if kind.offloads))
        raise ConfigError(f"policy {name} cannot run under kv_device_budget; those that can: {able}")


def engine_for(policy: str, engine: EngineOptions) -> EngineOptions:
    """Return the options for a policy in a comparison, without those that it cannot run under.

    Full attention then has its cache on the device: that is what a method in two tiers has to beat.
    """
    kind = policy_class(policy)
    budget = engine.kv_device_budget if kind.offloads else None
    return replace(engine, kv_device_budget=budget, lossless=engine.lossless and kind.drafts)
