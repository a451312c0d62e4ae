"""What a policy's steps read and what its slots take, from its own hooks; a model's bytes of a step are in `step`."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from sfi_core.engine.run import reads_in_place
from sfi_core.errors import ConfigError
from sfi_core.policies import Policy, Triggered, policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.memory import FLOAT32, packed_rows
from sfi_core.sizes.step import ByteModel, fast_tokens
from sfi_core.state.layer_pages import LayerShape, SegmentShape
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
    stated: float | None  # the rate if the trigger decides, else None
    rate: float  # the share of slow steps
    dense_share: float  # the share of KV heads that attend to everything in fast steps too

    @classmethod
    def of(cls, name: str, config: SfiConfig, shapes: Sequence[LayerShape], rate: float) -> Self:
        """Ask a policy; the trigger's `rate` is of no effect on a policy that plans by itself.

        Raise `ConfigError` as the policy does, such as synckv without a file of heads.
        """
        full = {index: shape for index, shape in enumerate(shapes) if shape.window is None}
        policy = untriggered(name, config, [*full])
        policy.key_width = max(shape.key_width for shape in full.values())
        triggered = isinstance(policy, Triggered)
        planned = sum(bool(policy.plan([RequestState(step=step)])[0]) for step in range(PLANNED)) / PLANNED
        fast = RequestState(step=1, slow=False)
        shares = [
            len(policy.companion.dense_heads(fast, index, shape.heads)) / shape.heads
            for index, shape in full.items()
            if index not in policy.config.dense_layers
        ]
        share = sum(shares) / max(1, len(shares))
        return cls(policy, rate if triggered else None, rate if triggered else planned, share)

    @property
    def packed(self) -> int:
        """Sink and selected tokens for each KV head."""
        return self.policy.config.sink + (self.policy.config.budget if self.policy.selects else 0)

    @property
    def has_fast(self) -> bool:
        """Whether there are fast steps."""
        return self.stated is not None or self.rate < 1

    @property
    def has_slow(self) -> bool:
        """Whether there are slow steps."""
        return self.stated is not None or self.rate > 0

    def choosing(self, context: int) -> float:
        """Return what choosing reads in a fast step with `context` cached tokens, in tokens' worth."""
        recent = max(0, context - self.policy.config.recent)
        state = RequestState(prompt_tokens=context, length=context, recent_start=recent, step=1, slow=False)
        return self.policy.selection_tokens(state)

    def steps(self, model: ByteModel, context: int) -> tuple[float, float]:
        """Return the bytes of a request's fast and slow step with `context` cached tokens."""
        config, policy = self.policy.config, self.policy
        read = min(context, fast_tokens(config, self.packed - config.sink, self.rate))
        mixed = read + self.dense_share * (context - read)
        slow = model.fast(context, mixed if policy.mixes_heads else context)
        if policy.refreshes():
            slow += model.refresh(context, min(context, self.packed))
        return float(model.fast(context, mixed + self.choosing(context))), float(slow)

    def mean(self, model: ByteModel, context: int) -> float:
        """Return the mean bytes of a request's step."""
        fast, slow = self.steps(model, context)
        return (1 - self.rate) * fast + self.rate * slow

    def break_even(self, model: ByteModel) -> int | None:
        """Return the cached tokens from which on the policy reads less than full attention; None for never."""
        return break_even(lambda context: self.mean(model, context), lambda context: float(model.dense(context)))


def check_slots(
    policy: Policy,
    shape: SegmentShape,
    *,
    slots: int,
    layers: int,
    longest: int,
    query_heads: int,
    backend: str,
    limit: int | None,
) -> None:
    """Raise `ConfigError`, with budget and slots that fit, for slots of more than `limit` bytes; None is no limit.

    In each slot `layers` have a segment for a request of `longest` tokens, with rows of `shape` below `query_heads`
    query heads, and the policy's summaries.
    """
    layer = LayerShape(
        heads=shape.heads, key_width=shape.key_width, value_width=shape.value_width, itemsize=shape.dtype.itemsize,
        query_heads=query_heads,
    )  # fmt: skip
    summary, sink = policy.summary_bytes(layer, longest), policy.config.sink
    row_bytes = shape.row_bytes(packs=not reads_in_place(policy, backend))
    slot = layers * (packed_rows(policy, longest) * row_bytes + summary)
    if limit is None or slots * slot <= limit:
        return
    budget = (limit // (slots * layers) - summary) // row_bytes - sink
    fewer = limit // slot
    fits = [f"budget to at most {budget}"] if budget > 0 else []
    fits += [f"slots to at most {fewer}"] if fewer > 0 else []
    raise ConfigError(
        f"budget {policy.config.budget} for {slots} slots takes {slots * slot / GB:.6g} GB of memory of their own, "
        f"slots_memory allows {limit / GB:.6g} GB; set {' or '.join([*fits, 'slots_memory higher'])}"
    )


def norm_count(free: int, layers: int, shape: SegmentShape) -> int:
    """Return the norms (float32) of a layer in a cache that fills `free` bytes, norms included.

    `free` may include bytes of activations: they only make the room too large.
    """
    keys = (shape.key_width + shape.value_width) * shape.dtype.itemsize
    return max(free, 0) // (layers * (keys + FLOAT32))
