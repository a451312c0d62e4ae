"""A device budget as users write it."""

import pytest

from sfi_core.errors import ConfigError
from sfi_core.settings.engine import DeviceBudget


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("20%", 200_000_000_000),
        ("0.5%", 5_000_000_000),
        ("100%", 1_000_000_000_000),
        ("2GiB", 2 * 1024**3),
        ("0.5GiB", 1024**3 // 2),
        ("500MB", 500_000_000),
        ("1.5 kB", 1500),
        ("3KiB", 3072),
        ("7MiB", 7 * 1024**2),
        ("2TiB", 2 * 1024**4),
        ("2tb", 2 * 10**12),
        ("1GB", 10**9),
        ("1073741824", 1024**3),
    ],
)
def test_a_share_is_of_the_cache_and_a_size_is_bytes(text: str, wanted: int):
    budget = DeviceBudget.parse(text)
    assert budget.bytes_of(10**12) == wanted


def test_a_share_is_exact_and_rounds_down():
    assert DeviceBudget.parse("1.1%").bytes_of(10**18) == 11 * 10**15
    assert DeviceBudget.parse("50%").bytes_of(7) == 3


@pytest.mark.parametrize(
    "text", ["x", "", "0%", "101%", "-5%", "2 gigabytes", "0GiB", "1.5", "2Gi", "1e9", "nan%", "%"]
)
def test_anything_else_is_refused_in_one_line(text: str):
    with pytest.raises(ConfigError) as caught:
        DeviceBudget.parse(text)
    assert str(caught.value) == (f"kv_device_budget must be a share such as 20% or a size such as 2GiB, got {text!r}")
