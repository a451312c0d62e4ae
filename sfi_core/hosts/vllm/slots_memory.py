"""The memory of the slots: packed segments and codes, allocated before vLLM measures the rest for its cache.

vLLM loads the weights, lets each attention layer finish them (`process_weights_after_loading`), runs the
model once to measure its memory, and gives the rest to its cache. A segment that is allocated in the second
step makes the cache smaller; one that is allocated later would end in "out of memory".
"""

import torch

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.packed_segment import SegmentShape
from sfi_kernels.code_scan import BatchCodes

GB = 1e9


def segment_rows(config: SfiConfig, longest: int, *, selects: bool) -> int:
    """Return the rows of a packed segment: sink and selected tokens of a request of `longest` tokens."""
    return config.sink + (min(config.budget, longest) if selects else 0)


def check_slots(
    config: SfiConfig, rows: int, slots: int, layers: int, row_bytes: int, limit: int | None, summary: int = 0
) -> None:
    """Raise `ConfigError`, with budget and slots that fit, for slots of more than `limit` bytes.

    In each slot `layers` have a segment of `rows` rows and `summary` bytes of the policy's own; a `limit` of None
    allows everything.
    """
    slot = layers * (rows * row_bytes + summary)
    need = slots * slot
    if limit is None or need <= limit:
        return
    budget = (limit // (slots * layers) - summary) // row_bytes - config.sink
    fewer = limit // slot
    fits = [f"budget to at most {budget}"] if budget > 0 else []
    fits += [f"slots to at most {fewer}"] if fewer > 0 else []
    raise ConfigError(
        f"budget {config.budget} for {slots} slots takes {need / GB:.6g} GB of memory of their own, "
        f"slots_memory allows {limit / GB:.6g} GB; set {' or '.join([*fits, 'slots_memory higher'])}"
    )


def norm_count(free: int, layers: int, shape: SegmentShape) -> int:
    """Return the norms (float32) of a layer in a cache that fills `free` bytes, norms included.

    `free` may include bytes of activations: they only make the room too large.
    """
    keys = (shape.key_width + shape.value_width) * shape.dtype.itemsize
    return max(free, 0) // (layers * (keys + 4))


def codes_of(shape: SegmentShape, slots: int, query_heads: int, longest: int) -> BatchCodes:
    """Allocate a layer's codes for requests of at most `longest` tokens."""
    key, value = (
        torch.empty(0, shape.heads, 1, width, dtype=shape.dtype, device=shape.device)
        for width in (shape.key_width, shape.value_width)
    )
    return BatchCodes.empty(slots, query_heads // shape.heads, key, value, longest)
