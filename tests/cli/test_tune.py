"""`sfi tune`: from traces to a file for --config, and each bad input."""

import json
import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path

import optuna
import pytest

from sfi_core.errors import BackendError, ConfigError, SfiError, TraceError
from sfi_core.settings.config import SfiConfig
from tests.cli.trace_commands import sfi, ways
from tests.small_example import small_example
from tests.traces.made import CONFIG, MODEL, make_trace
from tests.traces.small import fixed_folder

TRIALS = ("--trials", "12")


full = fixed_folder(requests=2, seed=1)
invoke, document, refused = ways("tune")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_search_writes_the_chosen_settings_and_shows_the_front(full, folder):
    result = invoke(full, *TRIALS)
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == {"tuned.toml"}
    assert result.stderr.endswith("Wrote tuned.toml\n")
    data = document(full, *TRIALS, "-o", "again.toml")
    (chosen,) = [row for row in data["front"] if row["chosen"]]
    config = SfiConfig().merge_toml(folder / "tuned.toml")
    assert config.budget == chosen["budget"]
    assert config.to_dict() == SfiConfig().replace(**data["config"]).to_dict()
    provenance = tomllib.loads((folder / "tuned.toml").read_text())["provenance"]
    assert provenance["predicted"]["retained_mass"] == chosen["retained_mass"]
    assert (provenance["trials"], provenance["model"]) == (12, "made-up")
    assert provenance["versions"]["optuna"] == optuna.__version__
    assert data["trials"] == 12
    text = result.stdout
    assert f"{len(data['front'])}" in text
    for row in data["front"]:
        if row["chosen"]:
            (line,) = [line for line in text.splitlines() if " > " in line[:12]]
            assert f"{row['retained_mass']:.3f}" in line
    assert "Chosen: " in text
    assert "the knee" in text


def test_the_space_and_the_figure_are_those_of_the_options(full, folder):
    data = document(
        full, *TRIALS, "--trigger-policy", "boundary", "--budget", "5,10", "--t-max", "4:9",
        "--search", "span=0", "--trigger-set", "stops=.", "--trigger-set", "words=cat dog",
        "--plot", "front.png",
    )  # fmt: skip
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    assert [trigger_set["name"] for trigger_set in data["trigger_sets"]] == ["stops", "words"]
    for row in data["front"]:
        assert row["budget"] in (5, 10)
        assert 4 <= row["t_max"] <= 9
        assert (row["span"], row["policy"]) == (0, "boundary")
        assert row["triggers"] in ("stops", "words")
    config = SfiConfig().merge_toml(folder / "tuned.toml")
    assert config.triggers in ((".",), ("cat", "dog"))


def test_a_trace_of_codescan_is_searched_for_codescan_s_budget(folder):
    config = CONFIG | {"recent_mode": "sliding", "window_prefill": 256}
    trace = make_trace(folder / "scan", policy="codescan", config=config)
    data, text = document(trace, *TRIALS), invoke(trace, *TRIALS, "-o", "x.toml").stdout
    assert sorted(data["space"]) == ["budget", "recent", "trigger_policy"]
    assert {(row["policy"], row["slow_rate"], row["t_max"]) for row in data["front"]} == {("codescan", 0, None)}
    assert len({row["budget"] for row in data["front"]}) > 1
    assert "Run it with --policy codescan." in text
    written = tomllib.loads((folder / "tuned.toml").read_text())
    assert written["provenance"]["policy"] == data["policy"] == "codescan"
    assert (written["budget"], written["recent"]) == (data["config"]["budget"], data["config"]["recent"])
    assert "t_max" in str(refused(trace, "--t-max", "4,8", "-o", "y.toml"))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["--budget", "25"], TraceError, "record with --set audit.top=25"),
        (["--trigger-set", "a=.", "--trigger-set", "a=!"], ConfigError, "got 'a' twice"),
        (["-o", "none/x.toml"], SfiError, "cannot be written: No such file"),
        (["--plot", "x.pdf"], ConfigError, "plot must end in one of"),
        (["--min-retained", "0.999", "--trials", "5"], SfiError, "got none in 5: the closest keeps"),
        (["--confirm", "1"], TraceError, "must be of the model that --model names"),
    ],
)
def test_bad_options_are_refused_in_one_line(full, folder, arguments, kind, message):
    before = set(folder.iterdir())
    error = refused(full, *arguments)
    assert type(error) is kind or (kind is SfiError and isinstance(error, SfiError))
    assert message in str(error)
    assert set(folder.iterdir()) == before


def test_bad_traces_are_refused_in_one_line(full, folder):
    plain = str(make_trace(folder / "plain", audit=None))
    other = str(make_trace(folder / "other", model={**MODEL, "query_heads": 8}))
    assert "has no audit; record it with --audit 1" in str(refused(plain))
    assert "traces must be of one model" in str(refused(full, other))
    assert "is not a trace" in str(refused(str(folder)))


def test_files_are_not_overwritten_unasked(full, folder):
    (folder / "tuned.toml").write_text("mine")
    assert "output tuned.toml exists; add --force" in str(refused(full))
    assert (folder / "tuned.toml").read_text() == "mine"


def test_without_optuna_the_extra_is_named(full, folder, monkeypatch):
    monkeypatch.setattr("sfi_core.errors.find_spec", lambda name: None)
    error = refused(full)
    assert isinstance(error, BackendError)
    assert "pip install -e '/" in str(error)
    assert str(error).endswith("[tune]'")


@pytest.mark.exhaustive
def test_ctrl_c_writes_the_best_so_far(command, environment, full, folder):
    worker = subprocess.Popen(
        [*command, "tune", str(full), "--trials", "5000"], cwd=folder, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not re.search(r"searching.* [1-9]", worker.stderr.readline()):
        assert worker.poll() is None
    os.kill(worker.pid, signal.SIGINT)
    out, err = worker.communicate(timeout=30)
    assert worker.returncode == 130
    assert "Pareto front" in out
    assert "interrupted" in err
    assert "Traceback" not in err
    assert {path.name for path in folder.iterdir()} == {"tuned.toml"}


@pytest.mark.exhaustive
def test_a_tuned_file_runs_and_was_measured(folder):
    with small_example():
        sfi("trace", "record", "-o", "dense", "--policy", "full-kv", "--audit", "1", "-q")
        data = json.loads(sfi("tune", "dense", "--trials", "8", "--confirm", "2", "--json").stdout)
        generated = json.loads(sfi("generate", "--config", "tuned.toml", "--json", "--no-compare").stdout)
    assert len(data["confirmed"]) == 2
    (chosen,) = [row for row in data["confirmed"] if data["front"][row["place"]]["chosen"]]
    assert chosen["exact_match"]
    provenance = tomllib.loads(Path("tuned.toml").read_text())["provenance"]
    assert provenance["confirmed"]["error"] == chosen["error"]
    assert provenance["confirmed"]["exact_match"]
    assert generated["exact_match"]
    assert generated["config"]["budget"] == data["config"]["budget"]
    assert generated["requests"][0]["slow_steps"] == chosen["measured"]["slow_steps"]
