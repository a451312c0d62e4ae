"""`sfi tune heads`: from texts to a head file, beside `sfi tune DIR...`."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sfi_cli import app as cli
from sfi_core.errors import ConfigError, TraceError
from sfi_core.models.load import BUNDLED
from sfi_core.policies.built_in.synckv import HeadClusters
from tests.cli.test_tune import folder, invoke, refused
from tests.traces.made import make_trace

__all__ = ["folder"]  # a fixture
pytest.importorskip("scipy")


@pytest.mark.exhaustive
def test_texts_make_a_head_file_and_a_document(folder):
    """One cluster a layer, of the bundled checkpoint with two KV heads."""
    Path("a.txt").write_text("Belora hid a red lantern under the old bridge. " * 20)
    arguments = ("heads", "-f", "a.txt", "--length", "40", "--top-k", "8", "--clusters", "1")
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    clusters = HeadClusters.load(Path("heads.json"))
    assert clusters.digest == HeadClusters.load(BUNDLED / "heads.json").digest
    sizes = {number: len(layer.representatives) for number, layer in clusters.layers.items()}
    assert sizes == dict.fromkeys(range(4), 1)
    assert document["texts"] * 40 == document["tokens"]
    assert document["steps"] == document["texts"] * (40 - 8)
    for layer in document["layers"]:
        S = layer["similarity"]
        assert S[0][0] == S[1][1] == 1
        assert S[0][1] == S[1][0] == layer["similarity_within"]
        assert 0 < S[0][1] < 1


def test_what_cannot_be_clustered_is_refused_in_one_line(folder):
    Path("a.txt").write_text("words " * 50)
    text = ("heads", "-f", "a.txt", "--top-k", "8")
    assert "the layer's 2 KV heads, got 3" in str(refused(*text, "--clusters", "3"))
    assert "got none; add -f FILE" in str(refused("heads", "--model", "somewhere"))
    assert not Path("heads.json").exists()
    Path("heads.json").write_text("kept")
    assert isinstance(refused(*text), ConfigError)
    assert Path("heads.json").read_text() == "kept"


def test_without_scipy_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("sfi_core.errors.find_spec", lambda name: None)
    assert re.search(r"pip install .*\[tune\]", str(refused("heads", "-f", "a.txt")))


def test_every_other_word_after_tune_is_a_trace(folder):
    """`heads` is the command; a folder of that name is `./heads`."""
    make_trace(folder / "heads", steps=30)
    searching = ("--trials", "2", "--force", "-q")
    for words in (["./heads"], ["-q", "heads"], ["--", "heads"]):
        result = invoke(*searching, *words)
        assert result.exit_code == 0, result.output
        assert "made-up, 1 request, 30 steps" in " ".join(result.stdout.split())
    assert invoke("./heads", *searching).exit_code == 0
    assert isinstance(refused("head", *searching), TraceError)


def test_a_shell_is_not_offered_a_name_of_two_words():
    asked = {"_SFI_COMPLETE": "complete_bash", "COMP_WORDS": "sfi tun", "COMP_CWORD": "1"}
    result = CliRunner().invoke(cli.app, [], env=asked, prog_name="sfi")
    assert result.stdout.split() == ["tune"]
