"""`sfi trace import`, and the other commands on what it wrote."""

import json
from pathlib import Path

import numpy as np
import pytest

from sfi_core.models.load import load_tokenizer
from tests.cli.trace_commands import trace
from tests.traces.imports import PROMPT, STEPS, K, selection_arrays, write_npz


@pytest.fixture
def imported(tmp_path) -> Path:
    assert trace("import", write_npz(tmp_path / "a.npz"), "-o", tmp_path / "a").code == 0
    return tmp_path / "a"


def test_it_says_what_was_imported(tmp_path):
    path = write_npz(tmp_path / "a.npz")
    ended = trace("import", path, "-o", tmp_path / "a")
    assert ended.code == 0
    assert f"selections of a.npz: 1 request, {STEPS} steps, 3 layers" in ended.stderr
    assert "the file has no masses" in ended.stderr
    assert "must" not in ended.stderr
    again = trace("import", path, "-o", tmp_path / "a")
    assert (again.code, again.stderr.count("\n")) == (2, 1)
    document = json.loads(trace("import", path, "-o", tmp_path / "a", "--force", "--json").stdout)
    assert document["imported"] == {
        "file": "a.npz", "version": 1, "kind": "selections", "masses": False, "block_size": None,
    }  # fmt: skip
    assert document["tables"]["steps"] == STEPS


def test_a_tokenizer_gives_texts_and_triggers(tmp_path):
    tokenizer = load_tokenizer()
    ids = tokenizer("One two. Three four five. Six!", add_special_tokens=False)["input_ids"][:STEPS]
    arrays = selection_arrays()
    path = write_npz(
        tmp_path / "a.npz", token_ids=np.array(ids), trigger_token_ids=None, positions=arrays["positions"][: len(ids)]
    )
    from sfi_core.models.load import BUNDLED  # noqa: PLC0415

    assert trace("import", path, "-o", tmp_path / "a", "--tokenizer", BUNDLED).code == 0
    document = json.loads(trace("show", tmp_path / "a", "--json").stdout)
    assert "." in {one["token_text"] for one in document["triggers"]}
    ended = trace("replay", tmp_path / "a", "--trigger", ".", "--json")
    assert [row["policy"] for row in json.loads(ended.stdout)["rows"]] == ["boundary"]


def test_every_reader_takes_it(imported, tmp_path):
    shown = trace("show", imported, "--full").stdout
    assert f"selections of a.npz, up to {K} positions" in shown
    assert "Overlap coefficient of consecutive supports" in shown
    assert "not recorded: retained mass, output error, query cosine\n" in shown
    assert "Time of a step" not in shown
    checked = trace("check", imported)
    assert (checked.code, checked.stdout.splitlines()[-1]) == (0, "sound")
    assert trace("diff", imported, imported).code == 0
    assert "3" in trace("sql", imported, "SELECT count(*) FROM supports WHERE step = 0").stdout
    assert trace("report", imported, "-o", tmp_path / "a.html").code == 0
    page = (tmp_path / "a.html").read_text()
    assert f"Imported selections of up to {K} positions" in page
    assert "nan ms" not in page
    assert trace("plot", imported, "-o", tmp_path / "plots", "--kind", "heatmap").code == 0


def test_a_step_read_its_own_selection_and_what_has_no_mass_shows_none(tmp_path):
    texts = {"prompt_token_texts": np.array([" p"] * PROMPT), "token_texts": np.array([" x"] * STEPS)}
    trace("import", write_npz(tmp_path / "a.npz", **texts), "-o", tmp_path / "a")
    found = json.loads(trace("show", tmp_path / "a", "--step", "5", "--json").stdout)
    read = found["passages"]
    assert {one["part"] for one in read} == {"selected"}
    own = set(selection_arrays()["positions"][5].ravel().tolist())
    assert sum(one["tokens"] for one in read) == len(own)
    assert (found["refreshed"], found["notes"], found["missed"]) == ([5], [], [])
    assert found["audited"] == []
    assert {one["mass"] for one in read} == {None}
    shown = trace("show", tmp_path / "a", "--step", "5").stdout
    assert "Passages that it read" in shown
    for words in ("all hold", "audited", "--audit", "of all that it read"):
        assert words not in shown


def test_intervals_are_replayed_without_being_asked_for(imported):
    rows = json.loads(trace("replay", imported, "--json").stdout)["rows"]
    assert [row["every"] for row in rows] == [1, 2, 4, 8, 16]
    assert [row["runs"] for row in rows] == [12, 6, 3, 2, 1]
    assert rows[0]["recall"] is None
    assert all(0 < row["recall"] < 1 for row in rows[1:])
    text = trace("replay", imported, "--refresh-every", "2,3").stdout
    assert "every 3 steps" in text
    assert "mass: not recorded." in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--refresh-every", "0"), "refresh-every must be at least 1"),
        (("--refresh-every", "x"), "refresh-every must be whole numbers"),
        (("--budget", "4"), "budget must come without --refresh-every"),
        (("--against", "x"), "against needs a recorded run's memory"),
        (("--play", "--refresh-every", "2"), "play shows the run as it was"),
        (("--trigger", "."), "has no text of its tokens"),
    ],
)
def test_what_an_import_cannot_be_asked_is_refused(imported, arguments, words):
    ended = trace("replay", imported, *arguments)
    assert ended.code in (2, 3)
    assert words in ended.stderr
    assert ended.stderr.count("\n") == 1
