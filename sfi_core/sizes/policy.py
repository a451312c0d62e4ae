"""What a policy's steps read and what its slots take, from its own hooks; a model's bytes of a step are in `step`."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from sfi_core.engine.run import reads_in_place
from sfi_core.errors import ConfigError
from sfi_core.policies import Policy, policy_class
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes.memory import FLOAT32, packed_rows
from sfi_core.sizes.step import ByteModel, fast_tokens
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.packed_segment import SegmentShape
from sfi_core.triggers.trigger import Trigger

LONGEST = 1 << 40  # tokens up to which a break-even is looked for
GB = 1e9


def untriggered(name: str, config: SfiConfig, layers: Sequence[int] = ()) -> Policy:
    """Make a policy without trigger tokens, to ask it what it needs; raise `ConfigError` as the policy does."""
    return policy_class(name)(config, Trigger(frozenset(), config), layers)


def break_even(sparse: Callable[[int], float], dense: Callable[[int], float]) -> int | None:
    """Return the fewest cached tokens at which `sparse` is less than `dense`; None for never."""
    tokens = bisect_left(range(LONGEST), True, key=lambda length: sparse(length) < dense(length))
    return None if tokens == LONGEST else tokens


def break_even_context(policy: Policy, rate: float, model: ByteModel) -> int | None:
    """Return the cached tokens from which on a policy reads less than full attention; None for never.

    A `rate` of its steps are slow; fast steps are taken to choose nothing, and to be alike for all KV heads.
    """
    config, packed = policy.config, packed_rows(policy, LONGEST)
    attended = fast_tokens(config, packed - config.sink, rate)

    def mean(context: int) -> float:
        slow = model.dense(context) + (model.refresh(context, min(context, packed)) if policy.refreshes() else 0)
        return float((1 - rate) * model.fast(context, min(context, attended)) + rate * slow)

    return break_even(mean, lambda context: float(model.dense(context)))


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
