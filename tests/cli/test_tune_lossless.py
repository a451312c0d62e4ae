"""`sfi tune --lossless`: from a recorded lossless run to a file that a lossless run takes."""

import json
import random
import tomllib

import pytest
from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_core.bundled.corpus import recall
from sfi_core.errors import ConfigError, SfiError, TraceError
from sfi_core.settings.config import SfiConfig
from sfi_traces.record.parquet import ParquetObserver
from tests.traces.lossless import LosslessRun
from tests.traces.made import make_trace


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, [*arguments], env={"COLUMNS": "100"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ParquetObserver(tmp_path / "drafts") as observer:
        LosslessRun(observer, most=(60, 45))
    make_trace(tmp_path / "plain", steps=12)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (["plain", "--lossless"], TraceError, "record it with sfi generate --lossless --trace DIR"),
        (["drafts"], TraceError, "must be of a plain run"),
        (["drafts", "--lossless", "--trials", "9"], ConfigError, "trials must come without --loss"),
        (
            ["drafts", "--lossless", "--study", "a.db"],
            ConfigError,
            "study must come without --loss",
        ),
        (["drafts", "--lossless", "--budget", "9"], ConfigError, "search of --lossless must be of"),
        (["drafts", "--lossless", "--set", "tune.mine=false"], ConfigError, "tune.mine must come"),
        (["drafts", "--lossless", "--prompt-file", "x"], ConfigError, "must come with --confirm"),
        (["drafts", "--lossless", "--trigger-set", "."], TraceError, "must have texts"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(folder, arguments, kind, message):
    before = set(folder.iterdir())
    error = invoke("tune", *arguments).exception
    assert isinstance(error, SfiError)
    assert type(error) is kind
    assert message in str(error)
    assert "\n" not in str(error)
    assert set(folder.iterdir()) == before


def test_the_bundled_run_is_tuned_confirmed_and_runs_with_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompt = recall(random.Random(5), sentences=80, asked=4).prompt
    (tmp_path / "prompt.txt").write_text(prompt)
    run = ("generate", "--lossless", "--prompt-file", "prompt.txt", "--max-new-tokens", "40",
           "--budget", "24", "--recent", "16")  # fmt: skip
    recorded = invoke(*run, "--trace", "drafts")
    assert recorded.exit_code == 0, recorded.output
    result = invoke("tune", "drafts", "--lossless", "--confirm", "1", "--json", "--t-max", "16")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (first, *others) = document["settings"]
    assert first["chosen"]
    assert others
    assert all("measured" not in row for row in others)
    measured, predicted = first["measured"], first["predicted"]
    assert measured["tokens"] == predicted["tokens"]
    assert 0 < measured["read_ratio"] < 2
    config = SfiConfig().merge_toml(tmp_path / "tuned.toml")
    assert config.draft.max_tokens == first["max_tokens"]
    assert (config.budget, config.draft.adaptive) == (24, False)
    provenance = tomllib.loads((tmp_path / "tuned.toml").read_text())["provenance"]
    assert provenance["confirmed"]["speed"] == measured["speed"]
    again = invoke("generate", "--lossless", "--config", "tuned.toml", "--prompt-file", "prompt.txt",
                   "--max-new-tokens", "40", "--trace", "tuned")  # fmt: skip
    assert again.exit_code == 0, again.output
    shown = json.loads(invoke("trace", "show", "tuned", "--json").stdout)["lossless"]
    assert shown["verifications"] == measured["verifications"]
    assert shown["accepted"] / shown["verifications"] == measured["accepted_per_verification"]
    text = invoke("tune", "drafts", "--lossless", "--force", "--set", "tune.batch_size=4").stdout
    assert "byte model: batch 4" in text
    assert "Chosen: 1, the most tokens a byte, predicted" in text
