"""The memory of a two-tier KV cache: all keys and values on the host, a step's on the device.

Nothing here runs a model or allocates. The sizes are those of `TwoTierStore`, on either backend.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Policy
from sfi_core.settings.engine import DeviceBudget
from sfi_core.sizes.memory import FLOAT32, INT32, packed_rows
from sfi_core.state.host_tier import BUFFERS, block_tokens
from sfi_core.state.layer_pages import LayerShape


@dataclass(frozen=True, slots=True)
class TwoTierBytes:
    """Bytes of a two-tier KV cache: in host memory, every layer's keys and values, rounded up to pages.

    On the device, `parts` has them by purpose: `ring`, the pages of the recent tokens; `packed`, the sink and selected
    rows; `scratch`, for one request's recalled rows; `norms` of the keys; `notes` of the policy, above all summaries of
    pages; `stream`, the buffers of dense reads; `resident`, the heads that stay on the device.
    """

    device_bytes: int
    host_bytes: int
    parts: Mapping[str, int]


def two_tier_bytes(
    layers: Sequence[LayerShape],
    policy: Policy,
    *,
    batch: int,
    capacity: int,
    page: int,
    longest_recent: int,
    resident: bool = False,
) -> TwoTierBytes:
    """Add up the bytes of a two-tier KV cache; layers of windows or states alone are left out.

    Layers left dense have no packed segment and no notes. A `page` and the `longest_recent` window of a step
    are in tokens, as is the `capacity` of a request. `resident` counts the heads that the policy would keep on the
    device.
    """
    full = {index: layer for index, layer in enumerate(layers) if layer.window is None}
    sparse = [layer for index, layer in full.items() if index not in policy.config.dense_layers]
    keeping = {index: layer for index, layer in full.items() if layer.owner is None}
    pages = -(-capacity // page)
    ring = min(ring_pages(longest_recent, page), pages) * page
    packed = [_packed_bytes(layer, packed_rows(policy, pages * page)) for layer in sparse]
    head_bytes = sum(
        layer.row_bytes // layer.heads * len(policy.resident(index, layer.heads)) for index, layer in keeping.items()
    )
    row_bytes = [layer.row_bytes for layer in keeping.values()]
    norm_bytes = FLOAT32 * sum(layer.heads for layer in keeping.values())
    room = batch * pages * page
    parts = {
        "ring": batch * ring * (sum(row_bytes) + norm_bytes),
        "packed": batch * sum(packed),
        "scratch": max(packed, default=0),
        "norms": room * norm_bytes,
        "notes": batch * sum(_note_bytes(layer, policy, capacity) for layer in sparse) if policy.selects else 0,
        "stream": BUFFERS * block_tokens(pages * page, page) * max(row_bytes, default=0),
        "resident": room * head_bytes if resident else 0,
    }
    return TwoTierBytes(sum(parts.values()), room * sum(row_bytes), MappingProxyType(parts))


def _packed_bytes(layer: LayerShape, rows: int) -> int:
    # rows with their positions, and how many count
    return rows * (layer.row_bytes + INT32 * layer.heads) + INT32 * layer.heads


def _note_bytes(layer: LayerShape, policy: Policy, capacity: int) -> int:
    # of a request: summaries of its keys, the last query, and SyncKV's static set
    query = layer.query_heads * layer.key_width * layer.itemsize
    return policy.summary_bytes(layer, capacity) + query + INT32 * layer.heads * min(policy.config.budget, capacity)


def ring_pages(longest_recent: int, page: int) -> int:
    """Return the pages that hold the recent tokens wherever they begin, and one more to write into."""
    return -(-(longest_recent + page - 1) // page) + 1


def check_device_budget(budget: DeviceBudget, expected: TwoTierBytes, least_bytes: int) -> None:
    """Raise `ConfigError` for a device budget that a run's two-tier cache exceeds.

    `budget` may be a share of the full cache, `expected.host_bytes`; `least_bytes` are those of a step that
    reads `config.recent` recent tokens. An anchored window, which grows between slow steps, needs more.
    """
    allowed = budget.bytes_of(expected.host_bytes)
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
