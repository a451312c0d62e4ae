"""What slots take: memory of requests that are served sparse, packed segments and the policy's own."""

from sfi_core.engine.run import reads_in_place
from sfi_core.errors import ConfigError
from sfi_core.policies.base import Policy
from sfi_core.sizes.memory import FLOAT32, packed_rows
from sfi_core.state.layer_shape import LayerShape
from sfi_core.state.packed_segment import SegmentShape

GB = 1e9


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
