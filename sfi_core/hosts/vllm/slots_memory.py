"""The memory of the slots: packed segments, allocated before vLLM measures what is left for its cache.

vLLM loads the weights, lets each attention layer finish them (`process_weights_after_loading`), runs the
model once to see what it takes, and gives the rest to its cache. A layer that allocates its segment while it
finishes its weights makes the cache smaller by it; one that allocates later would end in "out of memory".
"""

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.packed_segment import SegmentShape

GB = 1e9


def segment_rows(config: SfiConfig, longest: int, *, selects: bool) -> int:
    """Return the rows of a packed segment: sink and selected tokens of a request of `longest` tokens."""
    return config.sink + (min(config.budget, longest) if selects else 0)


def check_slots(
    config: SfiConfig, rows: int, slots: int, layers: int, shape: SegmentShape, limit: int | None
) -> None:
    """Refuse segments that take more memory than they may.

    Args:
        config: `budget` and `sink`.
        rows: Rows of a segment.
        slots: Requests that may be sparse at once.
        layers: Layers that have a segment.
        shape: What the segments' rows are, in this process.
        limit: Bytes that they may take; None where the system does not tell.

    Raises:
        ConfigError: With the budget and the slots that fit.
    """
    row = layers * shape.row_bytes
    need = slots * rows * row
    if limit is None or need <= limit:
        return
    budget = limit // (slots * row) - config.sink
    fewer = limit // (rows * row)
    fits = [f"budget to at most {budget}"] if budget > 0 else []
    fits += [f"slots to at most {fewer}"] if fewer > 0 else []
    raise ConfigError(
        f"budget {config.budget} for {slots} slots takes {need / GB:.6g} GB of packed segments, "
        f"slots_memory allows {limit / GB:.6g} GB; set {' or '.join([*fits, 'slots_memory higher'])}"
    )


def norm_count(free: int, layers: int, shape: SegmentShape) -> int:
    """Return how many norms (float32) a layer of a cache needs that takes what is free, norms included.

    Args:
        free: Bytes for keys, values and norms of all layers; those of activations may be among them.
        layers: Full-attention layers.
        shape: What a layer keeps of a token.
    """
    keys = (shape.key_width + shape.value_width) * shape.dtype.itemsize
    return max(free, 0) // (layers * (keys + 4))
