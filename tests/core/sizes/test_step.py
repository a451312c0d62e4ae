"""Bytes of a step, against the numbers of the project's performance notes."""

import pytest

from sfi_core.sizes.policy import break_even
from sfi_core.sizes.step import ByteModel

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
