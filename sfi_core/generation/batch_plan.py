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
    """The batch of a run over `requests` prompts, `slots` of them at a time, with at most `capacity` tokens a request.

    `free_bytes` is the free memory before the run, None if unknown; `tiers` are the bytes of the cache on device and
    host, None without a device budget.
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
    beginning: int = 0,
) -> BatchPlan:
    """Decide how many prompts are decoded together: `max_batch`, or as many as fit.

    `limits` are the most new tokens of each prompt; `shared` are the prompts after their dense pass, all decoded
    together; `graphs` says whether steps will be replayed as CUDA graphs, which take memory; the first `beginning`
    tokens of all prompts are the same and known. Raise `ConfigError` for a `max_batch` that is not positive or less
    than the shared prompts, and `MemoryForecastError` if it does not fit.
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
    give_back(device)
    free, tiers = free_bytes(device), session.tiers

    def expect(batch: int) -> Forecast:
        sizes = longest, capacity, prefill_chunk, max(limits)
        return session.forecast(batch, *sizes, graphs=graphs, beginning=beginning)

    def fitting(share: float) -> int:
        most = wanted if free is None else largest_batch(lambda n: expect(n).needed_bytes, wanted, share * free)
        return min(session.ranks.exchange(most))

    fits, slots = fitting(1.0), wanted
    if shared is None and not fits:
        slots = 1  # `check_fits` below then reports on one request
    elif shared is None and max_batch is None and fits < wanted:
        slots = max(1, fitting(SHARE))
    expected = expect(slots)
    with session.ranks.agreed():
        if slots > fits:
            way = f"max_batch to {fits}" if max_batch and fits else None
            check_fits(expected, device, way, two_tier=tiers is not None)
    tiered = None if tiers is None else tiers.planned(slots, capacity, capacity - longest)[0]
    return BatchPlan(requests=total, slots=slots, capacity=capacity, forecast=expected, free_bytes=free, tiers=tiered)
