"""Decides how many requests a run decodes together, from its memory forecast and the free memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from sfi_core.engine.shared_prompt import SharedPrompt
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers.session import Session
from sfi_core.machine.memory import free_bytes, give_back
from sfi_core.sizes.memory import Forecast, check_fits, largest_batch
from sfi_core.sizes.policy import TwoTierBytes

# of the free memory that a run without `max_batch` may fill, as a margin for the forecast
SHARE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """The batch of a run over `requests` prompts.

    `slots` requests are decoded together; each other one waits until a request has ended. A request may reach
    `capacity` tokens. `free_bytes` is the free memory before the run, None if unknown; `tiers` are the bytes
    of the cache on the device and in host memory, None without a device budget.
    """

    requests: int
    slots: int
    capacity: int
    forecast: Forecast
    free_bytes: int | None
    tiers: TwoTierBytes | None = None


def plan_batch(
    session: Session,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    max_batch: int | None = None,
    prefill_chunk: int = 0,
    shared: SharedPrompt | None = None,
    graphs: bool = False,
) -> BatchPlan:
    """Decide how many prompts are decoded together: `max_batch`, or as many as fit.

    `limits` are the most new tokens of each prompt; `shared` are the prompts after their dense pass, which
    are all decoded together; `graphs` says whether steps will be replayed as CUDA graphs, which take memory.

    Raise `ConfigError` if `max_batch` is not positive, or less than the shared prompts, and
    `MemoryForecastError` if one request, or `max_batch`, does not fit; the message says how many do.
    """
    total, device = len(prompts), session.model.device
    if max_batch is not None and max_batch < 1:
        raise ConfigError(f"max_batch must be positive, got {max_batch}")
    wanted = min(max_batch or total, total)
    if shared is not None and wanted < total:
        raise ConfigError(f"max_batch must be at least the {total} prompts of shared, got {wanted}")
    longest = max(map(len, prompts))
    capacity = max(len(prompt) + new for prompt, new in zip(prompts, limits, strict=True))
    capacity = capacity if shared is None else shared.capacity
    sizes = (longest, capacity, prefill_chunk)
    give_back(device)
    free, tiers = free_bytes(device), session.tiers

    def expect(batch: int) -> Forecast:
        return session.forecast(batch, *sizes, max(limits), graphs=graphs)

    def fitting(share: float) -> int:
        if free is None:
            return wanted
        return largest_batch(lambda batch: expect(batch).needed_bytes, wanted, share * free)

    fits = session.ranks.least(fitting(1.0))
    slots = wanted
    if shared is None and not fits:
        slots = 1  # `check_fits` below then reports on one request
    elif shared is None and max_batch is None and fits < wanted:
        slots = max(1, session.ranks.least(fitting(SHARE)))
    expected = expect(slots)
    with session.ranks.agreed():
        if slots > fits:
            way = f"max_batch to {fits}" if max_batch and fits else None
            check_fits(expected, device, way, two_tier=tiers is not None)
    return BatchPlan(
        requests=total,
        slots=slots,
        capacity=capacity,
        forecast=expected,
        free_bytes=free,
        tiers=None if tiers is None else tiers.bytes(slots, capacity, capacity - longest),
    )
