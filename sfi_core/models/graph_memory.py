"""The memory of CUDA graphs of whole decoding steps, beyond that of the same steps without graphs."""

from collections.abc import Sequence

from sfi_core.settings.config import SfiConfig
from sfi_core.state.layer_shape import LayerShape

INT32 = 4
# Paper gap: both are the libraries' own. What CUDA keeps of a graph of 2,000 kernels with their arguments:
# assumed. What cuBLAS keeps for the stream that steps are recorded on: 32 MiB on Hopper, 8 MiB before it.
GRAPH_BYTES = 16 << 20
LIBRARY_BYTES = 32 << 20


def step_sizes(batch: int, *, selects: bool) -> list[int]:
    """Return the numbers of slow requests, padding included, that a run has graphs for."""
    if not selects:
        return [0]
    return [0, *sorted({min(batch, 1 << power) for power in range(batch.bit_length() + 1)})]


def graph_bytes(
    layers: Sequence[LayerShape],
    config: SfiConfig,
    *,
    selects: bool,
    batch: int,
    capacity: int,
    vocabulary: int,
    step_bytes: int,
) -> int:
    """Add up the bytes of a run's graphs: a shared memory pool, and each graph's own.

    `layers` are those that select, `vocabulary` the numbers of a request's logits, `step_bytes` the largest
    transient of a step with all requests slow; graphs run one after the other.
    """
    sizes = step_sizes(batch, selects=selects)
    logits = len(sizes) * batch * vocabulary * layers[0].itemsize
    chosen = (
        sum(sizes) * sum(layer.heads for layer in layers) * min(config.budget, capacity) * INT32
    )
    return step_bytes + logits + chosen + len(sizes) * GRAPH_BYTES + LIBRARY_BYTES
