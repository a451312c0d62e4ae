"""The command line as a whole: help, version, doctor."""

import json
import signal
import subprocess
import sys
from functools import cache

import pytest
import torch
from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_cli.__main__ import main
from sfi_core.measure.doctor import _prompts, checks
from tests.cli.trace_commands import sfi


def test_help_imports_neither_torch_nor_transformers(environment):
    code = (
        "import sys\n"
        "from sfi_cli.app import app\n"
        "try:\n    app(['generate', '--help'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers', 'pyarrow'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)


def test_version_is_printed():
    assert sfi("--version") == (0, "sfi 0.1.0\n", "")


def test_doctor_names_a_dtype_in_which_attention_to_prompts_breaks(monkeypatch):
    def broken(query, *_, **options):
        return query * (torch.nan if query.dtype == torch.bfloat16 else 1)

    monkeypatch.setattr("sfi_core.measure.doctor.scaled_dot_product_attention", broken)
    brain, half = _prompts()
    assert (brain.ok, half.ok) == (False, True)
    assert brain.detail == "PyTorch's attention gives NaN or infinity here; load models in float32"


def test_doctor_tries_the_backends(monkeypatch):
    monkeypatch.setattr("sfi_core.measure.doctor.checks", cache(checks))
    text = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert "backend torch   ok" in text
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    found = {check["name"]: check["ok"] for check in document["checks"]}
    assert result.exit_code == 0
    assert found["backend torch"] is True
    assert found["prompt bfloat16"] is found["prompt float16"] is True
    assert {"machine", "versions", "triggers"} <= set(document)
    assert {row["trigger"] for row in document["triggers"]} == {"'.'", "'?'", "'!'", "';'", r"'\n'"}


class Interrupted:
    """A module whose loading is interrupted."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("stage", ["command line", "arguments", "command", "library"])
def test_ctrl_c_while_loading_is_one_line(monkeypatch, capsys, stage):
    """It was a traceback, nothing, or a missing module."""

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def half_imported(*_: object, **__: object) -> None:
        try:
            interrupted()
        except KeyboardInterrupt as error:
            raise ModuleNotFoundError("Could not import module 'AutoModel'") from error

    if stage == "command line":
        monkeypatch.setitem(sys.modules, "sfi_cli.app", Interrupted())
    elif stage == "arguments":
        monkeypatch.setattr("typer.core.TyperGroup.make_context", interrupted)
    else:
        ends = interrupted if stage == "command" else half_imported
        monkeypatch.setattr("sfi_core.measure.doctor.checks", ends)
    monkeypatch.setattr(sys, "argv", ["sfi", "doctor"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")


def test_advice_of_the_core_is_spelled_as_options():
    """The rule keeps the setting's name; a setting of a table keeps its own."""
    text = "kv_device_budget must hold 9, got 8; raise kv_device_budget, lower engine.kv_page, contexts or batches"
    assert cli.in_options(text) == (
        "kv_device_budget must hold 9, got 8; raise --kv-device-budget, lower engine.kv_page, --context or --batch"
    )
