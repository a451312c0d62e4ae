"""Bytes of a step, and of a two-tier cache, head by head and token by token."""

from itertools import product

import pytest

from sfi_core.errors import ConfigError
from sfi_core.policies.base import Companion, Evidence, Policy, Selection
from sfi_core.policies.page_bounds import extremes_bytes
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import DeviceBudget
from sfi_core.sizes.policy import break_even, check_device_budget, ring_pages, two_tier_bytes
from sfi_core.sizes.step import ByteModel
from sfi_core.state.layer_pages import LayerShape
from sfi_core.triggers.trigger import Trigger

WIDE = LayerShape(heads=4, key_width=8, value_width=6, itemsize=2, query_heads=12)
NARROW = LayerShape(heads=2, key_width=4, value_width=4, itemsize=2)
SLIDING = LayerShape(heads=4, key_width=8, value_width=6, itemsize=2, window=5)
LAYERS = (WIDE, SLIDING, NARROW)
CONFIG = SfiConfig(sink=3, budget=10, recent=7)
SIZES = {"batch": 2, "capacity": 101, "page": 8, "longest_recent": 20}


class Summing(Companion, Policy):
    """Selects, and keeps summaries of pages of 16 tokens and some heads of layers 0 and 2."""

    def select_after(self, context: Evidence) -> Selection:
        raise NotImplementedError

    def summary_bytes(self, layer: LayerShape, capacity: int) -> int:
        return extremes_bytes(layer, capacity, page=16)

    def resident(self, layer: int, heads: int) -> range:
        return super().resident(layer, heads) or range(heads if layer == 2 else 3)


def of(layers=LAYERS, config=CONFIG, kind=Summing, **changes):
    return two_tier_bytes(layers, kind(config, Trigger(frozenset(), config)), **{**SIZES, **changes})


def cells(layer: LayerShape, tokens: int, heads: int | None = None) -> int:
    """Count the bytes of tokens' keys and values number by number."""
    wide = range(layer.key_width + layer.value_width)
    return sum(layer.itemsize for _ in product(range(heads or layer.heads), range(tokens), wide))


@pytest.mark.parametrize("page", [1, 8, 64])
@pytest.mark.parametrize("recent", [1, 2, 8, 9, 256, 263])
def test_the_ring_holds_the_recent_tokens_wherever_they_begin(page: int, recent: int):
    touched = (len({token // page for token in range(first, first + recent)}) for first in range(page))
    assert ring_pages(recent, page) == max(touched) + 1


def packed(layer: LayerShape, rows: int) -> int:
    """Count rows, an int32 position of each, and an int32 length a head."""
    return cells(layer, rows) + 4 * layer.heads * (rows + 1)


def test_the_parts_are_those_of_every_request_and_full_attention_layer():
    """101 tokens are 13 pages of 8; 20 recent ones lie in up to 4 pages, and one is written."""
    forecast = of()
    assert dict(forecast.parts) == {
        "ring": 2 * (cells(WIDE, 40) + cells(NARROW, 40)),
        "packed": 2 * (packed(WIDE, 13) + packed(NARROW, 13)),
        "scratch": 2 * packed(WIDE, 13),
        "norms": 2 * 4 * (4 + 2) * 13 * 8,
        # 7 pages of two extremes and a float32 score
        "notes": 2 * 7 * (4 * (2 * 2 * 8 + 4) + 2 * (2 * 2 * 4 + 4)),
        "stage": 0,
        "resident": 0,
    }
    assert forecast.device_bytes == sum(forecast.parts.values())
    assert forecast.host_bytes == forecast.cache_bytes == 2 * (cells(WIDE, 13 * 8) + cells(NARROW, 13 * 8))
    assert dict(of(stages=True).parts) == {**forecast.parts, "stage": cells(WIDE, 13 * 8)}


def test_what_a_policy_does_not_need_does_not_count():
    few = of(kind=Policy).parts
    assert few["packed"] == 2 * (packed(WIDE, 3) + packed(NARROW, 3))
    assert few["notes"] == 0
    short = of(capacity=4).parts
    assert short["packed"] == 2 * (packed(WIDE, 3 + 8) + packed(NARROW, 3 + 8))
    assert short["ring"] == 2 * (cells(WIDE, 8) + cells(NARROW, 8))


def test_a_layer_left_dense_has_no_packed_rows_and_no_notes():
    parts = of(config=CONFIG.replace(dense_layers=(0, 1))).parts
    without = of((SLIDING, NARROW)).parts
    for name in ("packed", "scratch", "notes"):
        assert parts[name] == without[name]
    assert (parts["ring"], parts["norms"]) == (of().parts["ring"], of().parts["norms"])


def test_resident_heads_have_their_whole_cache_besides_and_a_resident_layer_has_nothing_else():
    forecast = of(resident=Summing(CONFIG, Trigger(frozenset(), CONFIG)).resident)
    assert forecast.parts["resident"] == 2 * (cells(WIDE, 13 * 8, 3) + cells(NARROW, 13 * 8))
    others = {**of().parts, "ring": 2 * cells(WIDE, 40)}
    assert {**forecast.parts, "resident": 0} == others
    assert (forecast.host_bytes, forecast.cache_bytes) == (2 * cells(WIDE, 13 * 8), of().host_bytes)


def test_a_budget_that_is_too_small_says_what_the_run_needs():
    expected, least = of(), of(longest_recent=CONFIG.recent).device_bytes
    check_device_budget(DeviceBudget.parse(str(expected.device_bytes)), expected, least)
    with pytest.raises(ConfigError) as caught:
        check_device_budget(DeviceBudget.parse(str(least - 1)), expected, least)
    assert str(caught.value) == (
        f"kv_device_budget must hold sink + recent + one page, at least {least} bytes, got {least - 1}; "
        "raise kv_device_budget, or lower the batch, budget or recent"
    )
    with pytest.raises(ConfigError, match=rf"longest recent window, {expected.device_bytes} bytes, got"):
        check_device_budget(DeviceBudget.parse(str(least)), expected, least)
    share = DeviceBudget.parse("20%")
    with pytest.raises(ConfigError, match=rf"at least {least} bytes, got {expected.cache_bytes // 5};"):
        check_device_budget(share, expected, least)


FAST = 4 + 2048 + 256


def model(batch: int) -> ByteModel:
    """Qwen3-4B; test_byte_roofline.py has the notes' whole table."""
    layer = {"heads": 8, "key_width": 128, "value_width": 128, "itemsize": 2, "window": None}
    layers = [{"layer": i, **layer} for i in range(36)]
    return ByteModel.of({"weight_bytes": 8.045e9, "layers": layers}, batch=batch)


def test_a_slow_step_reads_scores_and_copies_rows():
    bytes_, length = model(1), 32 * 1024
    keys_and_values = 147_456 * length
    extra = bytes_.slow(length, 2052) - bytes_.dense(length)
    assert extra == 16 * 8 * 36 * length + 2 * 147_456 * 2052
    assert 16 * 8 * 36 * length / keys_and_values == pytest.approx(0.031, abs=5e-4)


def test_sliding_windows_and_layers_left_dense_read_the_same_at_every_step():
    full = {"heads": 2, "key_width": 6, "value_width": 4, "itemsize": 2, "window": None}
    layers = [
        {"layer": 0, **full, "window": 100},
        {"layer": 1, **full},
        {"layer": 2, **full},
        {"layer": 3, **full, "heads": 1, "window": 1000},
    ]
    bytes_ = ByteModel.of({"weight_bytes": 600, "layers": layers}, dense_layers=[2], batch=3)
    assert (bytes_.row_bytes, bytes_.heads, bytes_.dense_row_bytes) == (40, 2, 40)
    always = 200 + 40 * 100 + 20 * 500 + 40 * 500
    assert bytes_.dense(500) == always + 40 * 500
    assert bytes_.fast(500, 50) == always + 40 * 50
    assert bytes_.slow(500, 30) == bytes_.dense(500) + 16 * 2 * 500 + 2 * 40 * 30
    assert bytes_.fast(50, 50) == bytes_.dense(50)
    assert bytes_.mean_attended(500, 100) == 300


def test_the_break_even_is_where_both_read_the_same():
    """And the mean of a run is the mean of its steps."""
    bytes_, packed, attended, slow = model(4), 2052, FAST, 0.25

    def mean_of(length, rate):
        return (1 - rate) * bytes_.fast(length, attended) + rate * bytes_.slow(length, packed)

    context = break_even(lambda length: mean_of(length, slow), bytes_.dense)
    means = []
    for length in (0.9 * context, context, 1.1 * context):
        mean = bytes_.mean(length, 0.75 * attended + slow * length, packed, slow)
        assert mean == pytest.approx(mean_of(length, slow))
        means.append(mean / bytes_.dense(length))
    assert means[0] > 1 > means[2]
    assert means[1] == pytest.approx(1, rel=1e-4)
    assert mean_of(context, slow) < bytes_.dense(context)
    assert mean_of(context - 1, slow) >= bytes_.dense(context - 1)
    assert break_even(lambda length: mean_of(length, 0.99), bytes_.dense) is None
