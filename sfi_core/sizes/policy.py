"""What a policy's steps read, and what its slots and its two tiers take, from its own hooks; nothing runs."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from sfi_core.errors import ConfigError
from sfi_core.policies import Policy, Triggered, policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DeviceBudget
from sfi_core.sizes.memory import FLOAT32, INT32, packed_rows
from sfi_core.sizes.step import ByteModel, fast_tokens
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger

PLANNED = 2520  # steps of a plan whose slow ones are counted: any stride up to 10 divides them
LONGEST = 1 << 40  # tokens up to which a break-even is looked for
GB = 1e9


def untriggered(name: str, config: SfiConfig, layers: Sequence[int] = ()) -> Policy:
    """Make a policy without trigger tokens, to ask it what it needs; raise `ConfigError` as the policy does."""
    return policy_class(name)(config, Trigger(frozenset(), config), layers)


def break_even(sparse: Callable[[int], float], dense: Callable[[int], float]) -> int | None:
    """Return the fewest cached tokens at which `sparse` is less than `dense`; None for never."""
    tokens = bisect_left(range(LONGEST), True, key=lambda length: sparse(length) < dense(length))
    return None if tokens == LONGEST else tokens


@dataclass(frozen=True, slots=True)
class PolicyReads:
    """The reads of a policy whose steps are slow at a rate: stated, or what the policy plans."""

    policy: Policy
    stated: bool  # whether the trigger decides, so that the rate is a given one
    rate: float  # the share of slow steps
    dense_share: float  # the share of KV heads that attend to everything in fast steps too

    @classmethod
    def of(cls, name: str, config: SfiConfig, shapes: Sequence[LayerShape], rate: float) -> Self:
        """Ask a policy; `rate` is without effect on one that plans by itself. Raise `ConfigError` as it does."""
        full = {index: shape for index, shape in enumerate(shapes) if shape.window is None}
        policy = untriggered(name, config, [*full])
        policy.key_width = max(shape.key_width for shape in full.values())
        triggered = isinstance(policy, Triggered)
        planned = sum(bool(policy.plan([RequestState(step=step)])[0]) for step in range(PLANNED)) / PLANNED
        shares = [
            len(policy.companion.dense_heads(index, shape.heads, slow=False)) / shape.heads
            for index, shape in full.items()
            if index not in policy.config.dense_layers
        ]
        share = sum(shares) / max(1, len(shares))
        return cls(policy, triggered, rate if triggered else planned, share)

    def steps(self, model: ByteModel, context: int) -> tuple[float, float]:
        """Return the bytes of a request's fast and slow step with `context` cached tokens."""
        config, policy = self.policy.config, self.policy
        selected = config.budget if policy.selects else 0
        read = min(context, fast_tokens(config, selected, self.rate))
        mixed = read + self.dense_share * (context - read)
        recent = max(0, context - config.recent)
        fast = RequestState(prompt_tokens=context, length=context, recent_start=recent, step=1, slow=False)
        slow = model.fast(context, mixed if policy.mixes_heads else context)
        if policy.refreshes():
            slow += model.refresh(context, min(context, config.sink + selected))
        return float(model.fast(context, mixed + policy.selection_tokens(fast))), float(slow)

    def mean(self, model: ByteModel, context: int) -> float:
        """Return the mean bytes of a request's step."""
        fast, slow = self.steps(model, context)
        return (1 - self.rate) * fast + self.rate * slow

    def break_even(self, model: ByteModel) -> int | None:
        """Return the cached tokens from which on the policy reads less than full attention; None for never."""
        return break_even(lambda context: self.mean(model, context), lambda context: float(model.dense(context)))


def check_slots(
    policy: Policy, shape: LayerShape, *, slots: int, layers: int, longest: int, limit: int | None, beside: int = 0
) -> None:
    """Raise `ConfigError`, with what fits, for `slots` and bytes `beside` them beyond `limit` bytes; None is no limit.

    In each, `layers` have a segment for a request of `longest` tokens with rows of `shape`, and the policy's summaries.
    """
    summary, sink = policy.summary_bytes(shape, longest), policy.config.sink
    row_bytes = shape.row_bytes * (not policy.chooses) + INT32 * shape.heads  # with the row's position
    slot = layers * (packed_rows(policy, longest) * row_bytes + summary)
    if limit is None or slots * slot + beside <= limit:
        return
    left = max(0, limit - beside)
    budget = (left // (slots * layers) - summary) // row_bytes - sink
    fewer = left // slot
    fits = [f"budget to at most {budget}"] if budget > 0 else []
    fits += [f"slots to at most {fewer}"] if fewer > 0 else []
    raise ConfigError(
        f"budget {policy.config.budget} for {slots} slots takes {(slots * slot + beside) / GB:.6g} GB of memory of "
        f"their own, slots_memory allows {limit / GB:.6g} GB; set {' or '.join([*fits, 'slots_memory higher'])}"
    )


def norm_count(free: int, layers: int, pair: int) -> int:
    """Return the norms (float32) of a layer in a cache that fills `free` bytes, norms included, or more.

    A key and its value have `pair` bytes.
    """
    return max(free, 0) // (layers * (pair + FLOAT32))


@dataclass(frozen=True, slots=True)
class TwoTierBytes:
    """Bytes of a two-tier KV cache."""

    cache_bytes: int  # every layer's keys and values, rounded up to pages
    host_bytes: int  # those in host memory
    # on the device, by purpose: `ring`, pages of the recent tokens; `packed`, sink and selected rows; `scratch`, for
    # a layer's old rows during a recall; `norms` of the keys; `notes` of the policy, above all summaries of pages;
    # `stage`, a layer's pages of one request, for a later piece of its prompt; `resident`, layers and heads
    parts: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


def two_tier_bytes(
    layers: Sequence[LayerShape],
    policy: Policy,
    *,
    batch: int,
    capacity: int,
    page: int,
    longest_recent: int,
    resident: Callable[[int, int], Sequence[int]] | None = None,
    stages: bool = False,
) -> TwoTierBytes:
    """Add up the bytes of a two-tier KV cache; layers of windows or states alone are left out.

    Layers left dense have no packed segment and no notes. `resident` is `TwoTierStore`'s; `stages` says whether a
    piece of a prompt needs a layer's pages on the device.
    """
    full = {index: layer for index, layer in enumerate(layers) if layer.window is None}
    sparse = [layer for index, layer in full.items() if index not in policy.config.dense_layers]
    keeping = {index: layer for index, layer in full.items() if layer.owner is None}
    pages = -(-capacity // page)
    ring = min(ring_pages(longest_recent, page), pages) * page
    rows = packed_rows(policy, pages * page)
    # rows with their positions, and how many count
    packed = [rows * layer.row_bytes + INT32 * layer.heads * (rows + 1) for layer in sparse]
    heads = {index: len(resident(index, layer.heads)) if resident else 0 for index, layer in keeping.items()}
    hosted = [layer.row_bytes for index, layer in keeping.items() if heads[index] < layer.heads]
    room = batch * pages * page
    parts = {
        "ring": batch * ring * sum(hosted),
        "packed": batch * sum(packed),
        "scratch": batch * max(packed, default=0) if hosted else 0,
        "norms": room * FLOAT32 * sum(layer.heads for layer in keeping.values()),
        "notes": batch * sum(policy.summary_bytes(layer, pages * page) for layer in sparse),
        "stage": pages * page * max(hosted, default=0) if stages else 0,
        "resident": room * sum(layer.row_bytes // layer.heads * heads[index] for index, layer in keeping.items()),
    }
    cache = room * sum(layer.row_bytes for layer in keeping.values())
    return TwoTierBytes(cache, room * sum(hosted), MappingProxyType(parts))


def ring_pages(longest_recent: int, page: int) -> int:
    """Return the pages that hold the recent tokens wherever they begin, and one more to write into."""
    return -(-(longest_recent + page - 1) // page) + 1


def check_device_budget(budget: DeviceBudget, expected: TwoTierBytes, least_bytes: int) -> None:
    """Raise `ConfigError` for a device budget that a run's two-tier cache exceeds.

    It may be a share of `expected.cache_bytes`; `least_bytes` are those of a step with `config.recent` recent tokens.
    """
    allowed = budget.bytes_of(expected.cache_bytes)
    if allowed < least_bytes:
        raise ConfigError(
            f"kv_device_budget must hold sink + recent + one page, at least {least_bytes} bytes, got "
            f"{allowed}; raise kv_device_budget, or lower the batch, budget or recent"
        )
    if allowed < expected.device_bytes:
        raise ConfigError(
            f"kv_device_budget must hold the longest recent window, {expected.device_bytes} bytes, got "
            f"{allowed}; raise kv_device_budget, lower t_max, or take recent_mode=sliding"
        )
