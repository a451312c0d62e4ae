"""Running `sfi` in a process of its own."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def command() -> list[str]:
    return [sys.executable, "-c", "from sfi_cli.app import main; main()"]


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """An environment that finds this checkout, stays off the network and has a wide terminal."""
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "traces")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = "sfi_core.measure.kernel_bench.timing"
    monkeypatch.setattr(f"{timing}.FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(f"{timing}.COPY_BYTES", {"cpu": 1 << 16})
