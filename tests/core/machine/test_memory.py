"""The process's peak, in bytes on every system."""

import resource
from types import SimpleNamespace

import pytest
import torch

from sfi_core.machine import memory


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_without_proc_is_in_the_unit_of_the_system(monkeypatch, tmp_path, platform, unit):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=4321))
    assert memory.peak_bytes(torch.device("cpu")) == 4321 * unit
