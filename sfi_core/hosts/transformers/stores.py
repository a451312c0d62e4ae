"""The two-tier KV store of a run under a device budget, and what a policy can run under."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.machine.memory import free_bytes
from sfi_core.policies import POLICIES, Policy, policy_class
from sfi_core.settings.engine import DeviceBudget, EngineOptions
from sfi_core.sizes.policy import TwoTierBytes, check_device_budget, ring_pages, two_tier_bytes
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.side_stream import side_of
from sfi_core.state.two_tier import TwoTierStore

Resident = Callable[[int, int], Sequence[int]]  # the resident KV heads, given a layer and its number of heads
TILE = 16  # tokens that a page of the Triton kernels is a multiple of
ABILITIES = {"offloads": "run under kv_device_budget", "drafts": "draft for a lossless run"}


class TierPlan:
    """The division of keys and values between host and device, under a device budget.

    Raise `ConfigError` for a budget that is no share or size, a policy that reads the whole cache on the device, or a
    recent window shorter than a page.
    """

    def __init__(
        self, budget: str, policy: Policy, name: str, shapes: Sequence[LayerShape], page: int, backend: str
    ) -> None:
        self.budget = DeviceBudget.parse(budget)
        self.policy, self.shapes, self.page, self.backend = policy, shapes, page, backend
        check_able(policy, name, "offloads")
        if policy.config.recent < page:
            raise ConfigError(
                f"recent must be at least a page of {page} tokens under kv_device_budget, got "
                f"{policy.config.recent}; lower engine.kv_page"
            )

    def longest_recent(self, generated: int) -> int:
        """Return the most recent tokens that a step or the policy reads, for a run that generates so many."""
        config, fast = self.policy.config, self.policy.most_fast_steps
        grows = 0
        if config.recent_mode == "anchored":
            grows = generated if fast is None else min(fast, generated)
        return max(config.recent + grows, self.policy.least_recent) + 1

    def bytes(
        self, batch: int, capacity: int, generated: int | None = None, resident: Resident | None = None
    ) -> TwoTierBytes:
        """Add up the bytes of a run, whose recent window never grows if `generated` is None."""
        least = max(self.policy.config.recent, self.policy.least_recent)
        recent = least if generated is None else self.longest_recent(generated)
        return two_tier_bytes(
            self.shapes, self.policy, batch=batch, capacity=capacity, page=self.page, longest_recent=recent,
            resident=resident, stages=self.backend == "triton",
        )  # fmt: skip

    def planned(self, batch: int, capacity: int, generated: int) -> tuple[TwoTierBytes, Resident]:
        """Return a run's bytes, and the KV heads that have all their pages on the device, as the budget has room.

        They are those that the policy names; then, if slow steps read everything, layer by layer all heads.
        """
        count = partial(self.bytes, batch, capacity, generated)
        policy, allowed = self.policy, self.budget.bytes_of(count().cache_bytes)
        named = resident = policy.resident if count(policy.resident).device_bytes <= allowed else _no_heads
        reads_all, whole = policy.triggered and policy.refreshes() and not policy.mixes_heads, list[int]()
        for index, shape in enumerate(self.shapes) if reads_all else ():
            more = partial(_with_layers, named, [*whole, index])
            if _has_pages(shape) and count(more).device_bytes <= allowed:
                whole, resident = [*whole, index], more
        return count(resident), resident

    def store(
        self, batch: int, capacity: int, generated: int, device: torch.device, dtype: torch.dtype
    ) -> TwoTierStore:
        """Make the store, its pages too, for keys of a `dtype`.

        Raise an `SfiError` for too small a budget or memory, a page of no whole tiles, or a backend that cannot read
        host memory.
        """
        if self.backend == "triton" and self.page % TILE:
            raise BackendError(
                f"engine.kv_page must be a multiple of {TILE} tokens under the triton backend, got {self.page}"
            )
        if self.backend != "triton" and device.type != "cpu":
            raise BackendError(
                f"kv_device_budget on a {device.type} device needs the triton backend, which reads host memory, got "
                f"{self.backend}"
            )
        expected, resident = self.planned(batch, capacity, generated)
        check_device_budget(self.budget, expected, self.bytes(batch, capacity).device_bytes)
        free = free_bytes(torch.device("cpu"))
        if free is not None and expected.host_bytes > free:
            raise MemoryForecastError(
                f"host memory must hold the whole cache, {expected.host_bytes / 1e9:.2f} GB, got "
                f"{free / 1e9:.2f} GB free; lower the batch or max_new_tokens"
            )
        store = TwoTierStore(
            batch, capacity, page_size=self.page, ring_pages=ring_pages(self.longest_recent(generated), self.page),
            backend=self.backend, side=side_of(device, overlap=True, role="tiers"), resident=resident,
            host_bytes=expected.host_bytes,
        )  # fmt: skip
        for index, shape in enumerate(self.shapes):
            if _has_pages(shape) and shape.itemsize == dtype.itemsize:
                widths = shape.key_width, shape.value_width
                like = [torch.empty(1, shape.heads, 0, width, dtype=dtype, device=device) for width in widths]
                store.allocate(index, *like)
        return store


def _has_pages(shape: LayerShape) -> bool:
    return shape.window is None and shape.owner is None


def _no_heads(layer: int, heads: int) -> Sequence[int]:
    del layer, heads
    return ()


def _with_layers(named: Resident, whole: Sequence[int], layer: int, heads: int) -> Sequence[int]:
    return range(heads) if layer in whole else named(layer, heads)


def check_able(policy: Policy | type[Policy], name: str, ability: str) -> None:
    """Raise `ConfigError` for a policy without one of `ABILITIES`; the message lists the policies that have it."""
    if not getattr(policy, ability):
        able = ", ".join(sorted(other for other, kind in POLICIES.items() if getattr(kind, ability)))
        raise ConfigError(f"policy {name} cannot {ABILITIES[ability]}; those that can: {able}")


def check_lossless(policy: Policy | type[Policy], name: str, engine: EngineOptions, *, audited: bool) -> None:
    """Raise `ConfigError` for what a lossless run cannot have, whatever the model."""
    check_able(policy, name, "drafts")
    if engine.kv_device_budget is not None:
        raise ConfigError("lossless must be off with kv_device_budget, whose host pages cannot be taken back")
    if audited:
        raise ConfigError("lossless must be off with an audit: a lossless run compares every drafted token itself")


def engine_for(policy: str, engine: EngineOptions) -> EngineOptions:
    """Return a policy's options in a comparison: without those that it cannot run under, as a rival to beat has."""
    kind = policy_class(policy)
    budget = engine.kv_device_budget if kind.offloads else None
    return replace(engine, kv_device_budget=budget, lossless=engine.lossless and kind.drafts)
