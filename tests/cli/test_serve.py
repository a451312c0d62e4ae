"""`sfi serve` before vLLM is imported; tests/vllm/test_serve.py has the server."""

import json
import sys

import pytest

from sfi_cli.commands import serve as job
from sfi_core.errors import BackendError, ConfigError
from sfi_core.hosts.vllm import plugin
from sfi_core.hosts.vllm.settings import Settings
from sfi_core.settings.config import SfiConfig
from tests.cli.trace_commands import ways

invoke, _, refused = ways("serve")


def test_without_vllm_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "find_spec", lambda name: None)
    error = refused()
    assert isinstance(error, BackendError)
    assert "pip install '.[vllm]'" in str(error)


def test_a_vllm_that_has_not_what_sfi_needs_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "find_spec", lambda name: object())
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.32.1")
    monkeypatch.setitem(sys.modules, "sfi_core.hosts.vllm.server", None)
    error = refused()
    assert isinstance(error, BackendError)
    assert str(error).startswith("sfi serve needs vLLM >=0.32,<0.34 that can be imported, got: ")


def test_another_vllm_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "find_spec", lambda name: object())
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.28.0")
    assert str(refused()) == "vLLM must be >=0.32,<0.34 for sfi, got 0.28.0"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--audit", "4"], "--audit needs a trace to write to; add --trace DIR"),
        (["--set", "trace.redact_text=true"], "add --trace DIR"),
        (["--set", "draft.max_tokens=3"], "draft.max_tokens"),
        (["--budget", "0"], "budget must be positive"),
        (["--", "--kv-transfer-config", "{}"], "without --kv-transfer-config"),
        (["--", "--kv_transfer_config={}"], "without --kv-transfer-config"),
        (["--", "--port=1"], "give --port before --"),
        (["--max-model-len", "9"], "sfi serve has no option --max-model-len; if it is vLLM's, put it after --"),
        (["--polcy=sfi"], "did you mean --policy?"),
        (["--model", "smollm2"], "model must be a folder or hub id for vLLM, got the GGUF file smollm2"),
    ],
)
def test_refused_in_one_line(words: list[str], told: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "find_spec", lambda name: None)  # none of these gets as far
    error = refused(*words)
    assert isinstance(error, ConfigError)
    assert told in str(error)


def test_a_trace_folder_that_exists_is_refused(tmp_path):
    assert f"{tmp_path} exists" in str(refused("--trace", str(tmp_path)))


def test_vllm_gets_what_differs_from_the_defaults(tmp_path):
    file = tmp_path / "tuned.toml"
    file.write_text(SfiConfig().replace(budget=77, selector={"alpha": 0.25}).to_toml())
    words = made("--config", str(file), "--t-max", "9", "--slots", "3", "--model", "m")
    assert words[:2] == ["--model", "m"]
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {
        "policy": "sfi", "slots": 3, "budget": 77, "t_max": 9, "selector": {"alpha": 0.25},
    }  # fmt: skip


def test_the_preset_is_named_and_what_differs_from_it(tmp_path):
    words = made("--preset", "paper", "--budget", "99", "--set", "serve.slots_memory=0.5")
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    extra = transfer["kv_connector_extra_config"]
    assert extra == {"policy": "sfi", "slots": 16, "slots_memory": 0.5, "preset": "paper", "budget": 99}
    assert Settings.of(extra).config == SfiConfig.preset("paper").replace(budget=99)


def test_a_config_file_may_have_settings_of_a_trace(tmp_path):
    file = tmp_path / "tuned.toml"
    file.write_text("[audit]\nevery = 4\n")
    assert "trace_audit" not in str(made("--config", str(file)))
    assert '"trace_audit": 4' in str(made("--config", str(file), "--trace", str(tmp_path / "new")))


def made(*words: str) -> list[str]:
    commands: list[list[str]] = []
    patch = pytest.MonkeyPatch()
    patch.setattr(job.Service, "run", lambda self: commands.append(self.words()))
    result = invoke(*words)
    patch.undo()
    assert result.exit_code == 0, result.output
    return commands[0]
