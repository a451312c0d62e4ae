"""The memory of a two-tier cache, against counts head by head and token by token."""

from itertools import product
from typing import Any

import pytest

from sfi_core.errors import ConfigError
from sfi_core.models.two_tier_forecast import (
    check_device_budget,
    least_device_bytes,
    ring_pages,
    two_tier_bytes,
)
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.device_budget import DeviceBudget
from sfi_core.state.layer_shape import LayerShape

WIDE = LayerShape(heads=4, key_width=8, value_width=6, itemsize=2)
NARROW = LayerShape(heads=2, key_width=4, value_width=4, itemsize=2)
SLIDING = LayerShape(heads=4, key_width=8, value_width=6, itemsize=2, window=5)
LAYERS = (WIDE, SLIDING, NARROW)
CONFIG = SfiConfig(sink=3, budget=10, recent=7)
SIZES: dict[str, Any] = {
    "batch": 2, "capacity": 101, "page": 8, "longest_recent": 20, "selects": True,
}  # fmt: skip


def of(layers=LAYERS, config=CONFIG, **changes):
    return two_tier_bytes(layers, config, **{**SIZES, **changes})


def cells(layer: LayerShape, tokens: int, heads: int | None = None) -> int:
    """Count the bytes of tokens' keys and values number by number."""
    wide = range(layer.key_width + layer.value_width)
    return sum(layer.itemsize for _ in product(range(heads or layer.heads), range(tokens), wide))


@pytest.mark.parametrize("page", [1, 8, 64])
@pytest.mark.parametrize("recent", [1, 2, 8, 9, 256, 263])
def test_the_ring_holds_the_recent_tokens_wherever_they_begin(page: int, recent: int):
    touched = (
        len({token // page for token in range(first, first + recent)}) for first in range(page)
    )
    assert ring_pages(recent, page) == max(touched) + 1


def test_the_parts_are_those_of_every_request_and_full_attention_layer():
    """101 tokens are 13 pages of 8; 20 recent ones lie in up to 4 pages, and one is written."""
    found = of(norms=True, summary_page=16)
    assert dict(found.parts) == {
        "ring": 2 * (cells(WIDE, 5 * 8) + cells(NARROW, 5 * 8)),
        "packed": 2 * (cells(WIDE, 13) + cells(NARROW, 13)),
        "scratch": 2 * cells(WIDE, 2 * 13),
        "norms": 2 * 4 * (4 + 2) * 13 * 8,
        "summaries": 2
        * 7
        * 2
        * 4
        * (4 * 8 + 2 * 4),  # requests, pages, extremes, float32, channels
        "stream": 2 * cells(WIDE, 2 * 1024),
        "resident": 0,
    }
    assert found.device_bytes == sum(found.parts.values())
    assert found.host_bytes == 2 * (cells(WIDE, 13 * 8) + cells(NARROW, 13 * 8))


def test_only_the_norms_and_summaries_that_a_policy_needs_count():
    assert (of().parts["norms"], of().parts["summaries"]) == (0, 0)
    assert of(selects=False).parts["packed"] == 2 * (cells(WIDE, 3) + cells(NARROW, 3))
    few = of(capacity=4)
    assert few.parts["packed"] == 2 * (cells(WIDE, 3 + 4) + cells(NARROW, 3 + 4))


def test_a_resident_layer_has_all_its_pages_and_nothing_else():
    found, without = of(resident_layers=(0, 1), norms=True), of((SLIDING, NARROW), norms=True)
    assert found.parts["resident"] == 2 * cells(WIDE, 13 * 8)
    assert {**found.parts, "resident": 0} == dict(without.parts)
    assert found.host_bytes == of().host_bytes


def test_representatives_keep_their_whole_cache_beside_what_all_heads_have():
    found = of(resident_heads=3)
    assert found.parts["resident"] == 2 * (cells(WIDE, 13 * 8, 3) + cells(NARROW, 13 * 8, 2))
    assert {**found.parts, "resident": 0} == dict(of().parts)


def test_the_least_is_a_run_whose_recent_window_never_grows():
    sizes = {name: value for name, value in SIZES.items() if name != "longest_recent"}
    least = least_device_bytes(LAYERS, CONFIG, **sizes)
    assert least == of(longest_recent=7).device_bytes < of().device_bytes


def test_a_budget_that_is_too_small_says_what_the_run_needs():
    sizes = {name: value for name, value in SIZES.items() if name != "longest_recent"}
    expected, least = of(), least_device_bytes(LAYERS, CONFIG, **sizes)
    check_device_budget(DeviceBudget.parse(str(expected.device_bytes)), expected, least)
    with pytest.raises(ConfigError) as caught:
        check_device_budget(DeviceBudget.parse(str(least - 1)), expected, least)
    assert str(caught.value) == (
        f"kv_device_budget must hold sink + recent + one page, at least {least} bytes, got {least - 1}; "
        "raise --kv-device-budget, or lower the batch, budget or recent"
    )
    with pytest.raises(
        ConfigError, match=rf"longest recent window, {expected.device_bytes} bytes, got"
    ):
        check_device_budget(DeviceBudget.parse(str(least)), expected, least)
    with pytest.raises(
        ConfigError, match=rf"at least {least} bytes, got {expected.host_bytes // 5};"
    ):
        check_device_budget(DeviceBudget.parse("20%"), expected, least)
