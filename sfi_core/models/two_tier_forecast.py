"""The memory of a two-tier KV cache: every key and value in host memory, what a step reads on the device.

Nothing here runs a model or allocates. The sizes are those of the store: pages of all KV heads, K and V.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.models.forecast import FLOAT32
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.device_budget import DeviceBudget
from sfi_core.state.host_stream import block_tokens
from sfi_core.state.layer_shape import LayerShape

BUFFERS = 2  # one is read while the other fills
EXTREMES = 2  # vectors of a page summary: lowest and highest of each channel


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTierBytes:
    """Bytes of a two-tier KV cache.

    Attributes:
        device_bytes: On the device, the sum of `parts`.
        host_bytes: In host memory: every layer's keys and values, rounded up to pages.
        parts: Bytes on the device by purpose: `ring`, the pages of the recent tokens; `packed`, the sink and
            selected rows; `scratch`, where recalled rows arrive; `norms` of the keys; `summaries` of pages;
            `stream`, the buffers of dense reads; `resident`, the layers and heads that are not offloaded.
    """

    device_bytes: int
    host_bytes: int
    parts: Mapping[str, int]


def two_tier_bytes(
    layers: Sequence[LayerShape],
    config: SfiConfig,
    *,
    batch: int,
    capacity: int,
    page: int,
    longest_recent: int,
    selects: bool,
    norms: bool = False,
    summary_page: int = 0,
    resident_layers: Collection[int] = (),
    resident_heads: int = 0,
) -> TwoTierBytes:
    """Add up the bytes of a two-tier KV cache; layers with a sliding window are left out.

    Args:
        layers: The shape of every layer.
        config: Sink and budget.
        batch: Requests.
        capacity: Tokens that a request may reach.
        page: Tokens of a page of the store.
        longest_recent: The most recent tokens that a step reads.
        selects: Whether the policy selects at all.
        norms: Whether the policy's Selector needs key norms.
        summary_page: Tokens of a page of Quest's or FreeKV's summaries; 0 for a policy without.
        resident_layers: Layers whose whole cache stays on the device, as those left dense do; they have no
            other part.
        resident_heads: KV heads of every other layer whose whole cache stays on the device beside what all
            heads have: SyncKV's representatives (Sec. 4.2).
    """
    full = [layer for layer in layers if layer.window is None]
    tiered = [
        layer
        for index, layer in enumerate(layers)
        if layer.window is None and index not in resident_layers
    ]
    pages = -(-capacity // page)
    rows = config.sink + (min(config.budget, capacity) if selects else 0)
    row, widest = _row_bytes(tiered), max((layer.row_bytes for layer in tiered), default=0)
    heads = sum(layer.heads for layer in tiered)
    representatives = (replace(each, heads=min(resident_heads, each.heads)) for each in tiered)
    kept = _row_bytes(full) - row + _row_bytes(representatives)
    channels = sum(layer.heads * layer.key_width for layer in tiered)
    summaries = -(-capacity // summary_page) if summary_page else 0
    per_request = {
        "ring": row * ring_pages(longest_recent, page) * page,
        "packed": row * rows,
        "scratch": BUFFERS * widest * rows,
        "norms": FLOAT32 * heads * pages * page if norms else 0,
        "summaries": EXTREMES * FLOAT32 * channels * summaries,
        "stream": BUFFERS * block_tokens(pages * page, page) * widest / batch,
        "resident": kept * pages * page,
    }
    parts = {name: round(batch * size) for name, size in per_request.items()}
    return TwoTierBytes(
        device_bytes=sum(parts.values()),
        host_bytes=batch * _row_bytes(full) * pages * page,
        parts=MappingProxyType(parts),
    )


def ring_pages(longest_recent: int, page: int) -> int:
    """Return the pages that hold the recent tokens wherever they begin, and one more to write into."""
    return -(-(longest_recent + page - 1) // page) + 1


def least_device_bytes(
    layers: Sequence[LayerShape], config: SfiConfig, *, batch: int, capacity: int, **sizes: Any
) -> int:
    """Return the least device bytes of a run: those of a step that reads `config.recent` recent tokens.

    A run whose recent window grows between two slow steps (`anchored`) needs more.

    Args:
        layers: The shape of every layer.
        config: Sink, recent and budget.
        batch: Requests.
        capacity: Tokens that a request may reach.
        sizes: The other arguments of `two_tier_bytes`, without `longest_recent`.
    """
    sizes |= {"batch": batch, "capacity": capacity, "longest_recent": config.recent}
    return two_tier_bytes(layers, config, **sizes).device_bytes


def check_device_budget(budget: DeviceBudget, expected: TwoTierBytes, least_bytes: int) -> None:
    """Refuse a device budget that a run's two-tier cache exceeds.

    Args:
        budget: What the user allows; a share is one of the host's bytes, the full cache.
        expected: The bytes of the run.
        least_bytes: Those of the run with the shortest recent window; see `least_device_bytes`.

    Raises:
        ConfigError: The message has the bytes needed, the bytes allowed, and what to change.
    """
    allowed = budget.bytes_of(expected.host_bytes)
    if allowed < least_bytes:
        raise ConfigError(
            f"kv_device_budget must hold sink + recent + one page, at least {least_bytes} bytes, got "
            f"{allowed}; raise --kv-device-budget, or lower the batch, budget or recent"
        )
    if allowed < expected.device_bytes:
        raise ConfigError(
            f"kv_device_budget must hold the longest recent window, {expected.device_bytes} bytes, got "
            f"{allowed}; raise --kv-device-budget, lower t_max, or take recent_mode=sliding"
        )


def _row_bytes(layers: Iterable[LayerShape]) -> int:
    return sum(layer.row_bytes for layer in layers)
