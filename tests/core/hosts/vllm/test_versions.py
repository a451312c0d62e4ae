"""Which vLLM the plugin takes, and that it stays out of others."""

import logging

import pytest

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import VERSIONS, plugin


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "unknown"])
def test_another_version_is_refused_in_one_line(found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    with pytest.raises(ConfigError, match=rf"^vLLM must be {VERSIONS} for sfi, got {found}$"):
        plugin.check_version()


@pytest.mark.parametrize("found", ["0.32.0", "0.33.1", "0.32.0+cpu"])
def test_versions_of_the_range_are_taken(found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    plugin.check_version()


def test_the_plugin_stays_out_of_another_version(monkeypatch, caplog):
    """It imports nothing of vLLM then: a name that it needs may be missing there."""
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.28.0")
    monkeypatch.setattr(plugin, "import_module", lambda _: pytest.fail("imported"))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert [r.getMessage() for r in caplog.records] == [f"sfi stays out: vLLM must be {VERSIONS} for sfi, got 0.28.0"]
