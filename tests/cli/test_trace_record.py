"""`sfi trace record` and `sfi generate --trace` from the outside."""

import json
import os
import shutil
import signal
import sys
import time
from importlib.util import find_spec
from threading import Thread

import pytest

from sfi_cli.app import main
from sfi_core.errors import BackendError
from sfi_core.models.load import BUNDLED
from sfi_traces import Trace
from sfi_traces.record import writer
from tests.cli.trace_commands import sfi as inside

PROMPT = "Later, Belora hid a red lantern under the old bridge.\nBelora"
SHORT = ("-n", "12", "--budget", "8", "--recent", "4", "--t-max", "4")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace") / "run"
    code, stdout, stderr = inside(
        "trace", "record", PROMPT, "-o", str(folder), "--audit", "2", "--set", "audit.top=16", "--json", *SHORT
    )
    assert code == 0
    assert f"sfi trace show {folder}" in stderr
    return folder, json.loads(stdout)


@pytest.mark.exhaustive
def test_the_document_and_the_trace_tell_the_same_run(recorded):
    folder, document = recorded
    (request,) = document["requests"]
    steps = Trace.open(folder).table("steps").to_pylist()
    assert [row["token_id"] for row in steps] == request["token_ids"]
    assert [row["step"] for row in steps if row["slow"]] == request["slow_at"]
    assert "".join(row["token_text"] for row in steps) == request["text"]
    read = [row["attended_tokens"] for row in steps[1:]]
    assert sum(read) / len(read) == pytest.approx(request["mean_attended_tokens"])


def test_the_manifest_says_where_the_trace_comes_from(recorded):
    folder, document = recorded
    manifest = Trace.open(folder).manifest
    assert manifest["model"]["name"] == "bundled"
    assert manifest["config"] == document["config"]
    assert manifest["trigger_token_ids"] == document["trigger_token_ids"]
    assert (manifest["preset"], manifest["seed"], manifest["max_new_tokens"]) == ("default", 0, 12)
    assert manifest["audit"] == {"every": 2, "top": 16, "layers": None}
    assert manifest["stopped"] is None


def test_a_redacted_trace_holds_no_text_and_is_overwritten_with_force_only(tmp_path):
    folder = tmp_path / "run"
    options = ("--set=trace.redact_text=true", "--audit=4", "--set=audit.layers=0,2-3", "-q", *SHORT)
    asked = ("trace", "record", PROMPT, "-o", str(folder), *options)
    assert inside(*asked)[0] == 0
    supports = Trace.open(folder).table("supports", ["layer"]).to_pylist()
    assert {row["layer"] for row in supports} == {0, 2, 3}
    assert Trace.open(folder).manifest["redacted"]
    assert b"lantern" not in b"".join(p.read_bytes() for p in folder.rglob("*") if p.is_file())
    before = (folder / "manifest.json").read_bytes()
    refused = f"error: trace folder {folder} exists; add --force to overwrite it\n"
    assert inside(*asked) == (2, "", refused)
    assert (folder / "manifest.json").read_bytes() == before
    assert inside(*asked, "--force", "-n", "3")[0] == 0
    assert Trace.open(folder).table("steps").num_rows == 3


@pytest.mark.parametrize("lacking", ["plotly", "jinja2"])
def test_a_report_that_cannot_be_made_is_refused_before_the_trace_is_read(tmp_path, monkeypatch, lacking):
    monkeypatch.setattr("sfi_core.errors.find_spec", lambda name: None if name == lacking else find_spec(name))
    code, _, stderr = inside("trace", "report", str(tmp_path / "run"))
    assert code == BackendError.exit_code
    assert stderr.endswith("[report]'\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("generate x --audit 1", "--audit needs a trace to write to; add --trace DIR"),
        ("generate x --set audit.top=8", "audit.top must come with --audit N, got it alone"),
        ("trace record x -o T --audit 0", "audit.every must be positive, got 0"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert inside(*arguments.split()) == (2, "", f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def endless(tmp_path_factory) -> list[str]:
    """A run of thousands of tokens, unless somebody ends it: nothing stops this model."""
    model = tmp_path_factory.mktemp("model") / "endless"
    shutil.copytree(BUNDLED, model)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text()) | {"eos_token_id": None}
        (model / name).write_text(json.dumps(settings))
    return ["generate", PROMPT, "--model", str(model), "--audit", "5", *SHORT, "-n", "9000"]


def test_ctrl_c_keeps_the_text_and_finishes_the_trace(endless, tmp_path, monkeypatch, capsys):
    """The signal comes once a part of the trace is there, wherever the run is."""
    folder = tmp_path / "run"
    part = folder / "steps" / "part-00000.parquet"

    def interrupt() -> None:
        limit = time.monotonic() + 60
        while not part.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        if part.exists():
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(writer, "SOONEST", 0.1)
    monkeypatch.setattr(sys, "argv", ["sfi", *endless, "--trace", str(folder)])
    Thread(target=interrupt).start()
    with pytest.raises(SystemExit) as ended:
        main()
    text, error = capsys.readouterr()
    assert ended.value.code == 130
    assert "interrupted" in error
    assert text
    manifest = Trace.open(folder).manifest
    assert manifest["stopped"] == "interrupted"
    assert manifest["tables"]["steps"] == Trace.open(folder).table("steps").num_rows > 0
