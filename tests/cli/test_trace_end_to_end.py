"""The bundled example recorded, and every other `sfi trace` command on what was recorded."""

import json
from pathlib import Path

import pytest

from sfi_core.bundled.example import load_example
from tests.cli.trace_commands import trace


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two runs of the bundled example: sfi, and full-kv for the counterfactuals."""
    folder = tmp_path_factory.mktemp("example")
    for name, policy in (("run", "sfi"), ("dense", "full-kv")):
        options = ["--policy", policy, "--audit", "1", "--set", "audit.top=512", "-q"]
        assert trace("record", "-o", folder / name, *options).code == 0
    return folder


def test_show_has_every_section_and_the_papers_question(folder):
    """Within-sentence support stability, of the bundled checkpoint's own run."""
    ended = trace("show", folder / "run", "--json")
    document = json.loads(ended.stdout)
    assert document["missing"] == []
    assert document["steps"]["reasons"] == {"trigger": 4, "first": 1}
    within, across = (document["stability"][where]["mean"] for where in ("within", "across"))
    assert within > across
    text = trace("show", folder / "run").stdout
    assert "within a sentence" in text
    assert "across a boundary" in text
    assert f"{within:.3f}" in text


def test_replay_predicts_what_the_real_run_measured(folder):
    """From full attention's trace alone; the tokens are the same, so every step is compared."""
    ended = trace("replay", folder / "dense", "--against", folder / "run", "--json")
    found = json.loads(ended.stdout)["validation"]
    predicted, measured = found["predicted"], found["measured"]
    assert found["same_schedule"]
    assert found["requests"][0]["steps"] == 50
    assert predicted["slow_rate"] == measured["slow_rate"]
    assert predicted["retained_mass"] == pytest.approx(measured["retained_mass"], abs=0.02)


def test_replay_plays_a_step(folder):
    ended = trace("replay", folder / "run", "--play", "--step", "10")
    assert ended.code == 0
    assert "slow" in ended.stdout
    assert load_example().prompt.rsplit(maxsplit=1)[-1] in ended.stdout


def test_export_makes_a_timeline_and_tables(folder, tmp_path):
    assert (
        trace("export", folder / "run", "--format", "perfetto", "-o", tmp_path / "t.json").code == 0
    )
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"X", "M", "C", "s", "f"} <= {event["ph"] for event in events}
    assert trace("export", folder / "run", "--format", "csv", "-o", tmp_path / "csv").code == 0
    lines = (tmp_path / "csv" / "steps.csv").read_text().splitlines()
    assert len(lines) > 50


def test_sql_answers(folder):
    query = "SELECT reason, count(*) AS n FROM steps WHERE slow GROUP BY reason ORDER BY reason"
    ended = trace("sql", folder / "run", query, "--format", "csv")
    assert ended.stdout.split() == ["reason,n", "first,1", "trigger,4"]


def test_check_finds_it_sound(folder):
    ended = trace("check", folder / "run")
    assert ended.code == 0
    assert "sound" in ended.stdout
