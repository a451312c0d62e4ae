"""The command line as a whole: help, version, doctor."""

import json
import subprocess
import sys
from functools import cache

from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_core.measure.doctor import checks
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


def test_doctor_tries_the_backends(monkeypatch):
    monkeypatch.setattr("sfi_core.measure.doctor.checks", cache(checks))
    text = CliRunner().invoke(cli.app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert "backend torch   ok" in text
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    found = {check["name"]: check["ok"] for check in document["checks"]}
    assert result.exit_code == 0
    assert found["backend torch"] is True
    assert {"machine", "versions", "triggers"} <= set(document)
    assert {row["trigger"] for row in document["triggers"]} == {"'.'", "'?'", "'!'", "';'", r"'\n'"}
