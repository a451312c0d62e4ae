"""The memory of the slots: packed segments, allocated before vLLM measures the rest for its cache.

vLLM loads the weights, lets each attention layer finish them (`process_weights_after_loading`), runs the
model once to measure its memory, and gives the rest to its cache. A segment that is allocated in the second
step makes the cache smaller; one that is allocated later would end in "out of memory".
"""

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.packed_segment import SegmentShape

GB = 1e9


def segment_rows(config: SfiConfig, longest: int, *, selects: bool) -> int:
    """Return the rows of a packed segment: sink and selected tokens of a request of `longest` tokens."""
    return config.sink + (min(config.budget, longest) if selects else 0)


def check_slots(config: SfiConfig, rows: int, slots: int, layers: int, shape: SegmentShape, limit: int | None) -> None:
    """Raise `ConfigError`, with budget and slots that fit, for segments of more than `limit` bytes.

    `layers` have a segment of `rows` rows of `shape`, for each slot; a `limit` of None allows everything.
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
    """Return the norms (float32) of a layer in a cache that fills `free` bytes, norms included.

    `free` may include bytes of activations: they only make the room too large.
    """
    keys = (shape.key_width + shape.value_width) * shape.dtype.itemsize
    return max(free, 0) // (layers * (keys + 4))
