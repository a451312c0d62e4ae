"""`sfi trace import`, `export` and `sql` from the outside."""

import csv
import gzip
import json

import numpy as np
import pytest

from sfi_cli.commands.trace import export
from sfi_core.errors import TraceError
from sfi_core.models.load import BUNDLED, load_tokenizer
from sfi_traces.export import perfetto
from sfi_traces.schema import TABLES
from tests.cli.trace_commands import trace
from tests.traces.imports import STEPS, K, selection_arrays, write_npz
from tests.traces.small import fixed_folder

recorded = fixed_folder(steps=30, policy="sfi")
QUERY = "SELECT reason, count(*) AS n, avg(read_ratio) AS read FROM steps GROUP BY 1 ORDER BY 1"


def test_export_writes_a_file_for_each_table(recorded, tmp_path):
    folder = tmp_path / "deep" / "tables"
    ended = trace("export", recorded, "--format", "csv", "-o", folder)
    assert ended.code == 0
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.csv" for name in TABLES)
    assert ended.stderr == "".join(f"Wrote {folder / name}.csv\n" for name in TABLES)
    assert len((folder / "steps.csv").read_text().splitlines()) == 31
    again = trace("export", recorded, "--format", "csv", "-o", folder)
    line = f"error: output {folder / 'prompts.csv'} exists; add --force to overwrite it\n"
    assert (again.code, again.stderr) == (2, line)
    (folder / "steps.csv").write_text("old")
    assert trace("export", recorded, "--format", "csv", "-o", folder, "--force").code == 0
    assert len((folder / "steps.csv").read_text().splitlines()) == 31
    assert len(list(folder.iterdir())) == len(TABLES)


def test_an_export_that_is_refused_leaves_nothing(recorded, tmp_path):
    (tmp_path / "timings.jsonl").write_text("mine")
    assert trace("export", recorded, "--format", "jsonl", "-o", tmp_path).code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["timings.jsonl"]


def test_one_table_goes_to_stdout_or_a_file(recorded, tmp_path):
    ended = trace("export", recorded, "--format", "jsonl", "--table", "steps")
    assert (ended.code, ended.stderr) == (0, "")
    assert [json.loads(line)["step"] for line in ended.stdout.splitlines()] == list(range(30))
    path = tmp_path / "steps.jsonl"
    assert trace("export", recorded, "--format", "jsonl", "--table", "steps", "-o", path).code == 0
    assert path.read_text() == ended.stdout


def test_the_timeline_is_one_json_document(recorded, tmp_path):
    path = tmp_path / "timeline.json"
    assert trace("export", recorded, "--format", "perfetto", "-o", path).stderr == f"Wrote {path}\n"
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == set("XM")
    assert trace("export", recorded, "--format", "perfetto").stdout == path.read_text()


def test_a_timeline_that_ends_in_gz_is_compressed(recorded, tmp_path):
    plain, packed, again = (tmp_path / name for name in ("a.json", "a.json.gz", "b.json.gz"))
    for path in (plain, packed, again):
        ended = trace("export", recorded, "--format", "perfetto", "-o", path)
        assert (ended.code, ended.stderr) == (0, f"Wrote {path}\n")
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.stat().st_size < plain.stat().st_size / 4
    assert packed.read_bytes() == again.read_bytes()  # neither its name nor the time is in it


def test_a_compressed_export_that_fails_leaves_the_old_file_and_no_other(recorded, tmp_path, monkeypatch):
    path = tmp_path / "timeline.json.gz"
    path.write_text("old")

    def broken(*_):
        yield "{"
        raise TraceError("the trace has a damaged part")

    monkeypatch.setattr(perfetto, "perfetto_text", broken)
    assert trace("export", recorded, "--format", "perfetto", "-o", path, "--force").code == 3
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("xlsx", "unknown format 'xlsx'; expected one of ('perfetto', 'csv', 'jsonl')"),
        ("csv", "csv of all tables must have a folder; add -o FOLDER or --table NAME"),
        ("csv --table step", "unknown table 'step'; did you mean 'steps'? expected one of ('prompts', "),
        ("perfetto --table steps", "table must come with --format csv or jsonl"),
    ],
)
def test_options_that_do_not_go_together_are_refused(recorded, arguments, line):
    ended = trace("export", recorded, "--format", *arguments.split())
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {line}")


def test_a_query_is_a_table_csv_or_json(recorded):
    table = trace("sql", recorded, QUERY)
    assert table.code == 0
    assert table.stdout.split()[:3] == ["reason", "n", "read"]
    lines = trace("sql", recorded, QUERY, "--format", "csv").stdout.splitlines()
    (header, *rows) = csv.reader(lines)
    assert header == ["reason", "n", "read"]
    assert [row[:2] for row in rows] == [["", "27"], ["first", "1"], ["trigger", "2"]]
    for option in (["--json"], ["--format", "json"]):
        document = json.loads(trace("sql", recorded, QUERY, *option).stdout)
        assert document["columns"] == header
        assert document["rows"][2] == {"reason": "trigger", "n": 2, "read": 1.0}


def test_a_cell_keeps_to_its_line(recorded):
    query = "SELECT chr(10) AS line, repeat('x', 100) AS long, 1.5::FLOAT AS float"
    ended = trace("sql", recorded, query)
    *_, row = ended.stdout.splitlines()
    assert row.split() == ["\\n", "x" * 77 + "...", "1.5"]


def test_a_long_table_is_cut_and_says_so(recorded, monkeypatch):
    monkeypatch.setattr(export, "MOST_ROWS", 3)
    ended = trace("sql", recorded, "SELECT step FROM steps")
    assert len(ended.stdout.split()[2:]) == 3
    assert ended.stderr == "only the first 3 rows; --format csv or json writes all\n"
    assert trace("sql", recorded, "SELECT step FROM steps LIMIT 3").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["SELECT nope FROM steps"], "query fails: Binder Error: Referenced column"),
        (["SELECT 1", "--format=x"], "unknown format 'x'; expected one of ('table', 'csv', 'json')"),
        (["SELECT 1 AS a, 2 AS a", "--json"], "columns must differ in name, got 'a' 2 times; use AS"),
    ],
)
def test_a_query_that_fails_is_one_line(recorded, arguments, line):
    ended = trace("sql", recorded, *arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"error: {line}")
    assert ended.stderr.count("\n") == 1


def test_a_file_of_rows_is_there_when_it_is_complete(recorded, tmp_path):
    path = tmp_path / "rows.csv"
    failing = "SELECT if(range = 5000, error('here'), range) AS n FROM range(9000)"
    assert trace("sql", recorded, failing, "--format", "csv", "-o", path).code == 2
    assert list(tmp_path.iterdir()) == []
    assert trace("sql", recorded, QUERY, "--format", "csv", "-o", path).stderr == f"Wrote {path}\n"
    assert path.read_text() == trace("sql", recorded, QUERY, "--format", "csv").stdout
    ended = trace("sql", recorded, QUERY, "-o", path)
    line = f"error: output {path} exists; add --force to overwrite it\n"
    assert (ended.code, ended.stderr) == (2, line)
    assert trace("sql", recorded, "SELECT 1", "--json", "-o", path, "--force").code == 0
    assert json.loads(path.read_text())["rows"] == [{"1": 1}]


@pytest.fixture
def imported(tmp_path):
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
    assert trace("import", path, "-o", tmp_path / "a", "--tokenizer", BUNDLED).code == 0
    document = json.loads(trace("show", tmp_path / "a", "--json").stdout)
    assert "." in {trigger["token_text"] for trigger in document["triggers"]}
    ended = trace("replay", tmp_path / "a", "--trigger", ".", "--json")
    assert [row["policy"] for row in json.loads(ended.stdout)["rows"]] == ["boundary"]


@pytest.mark.exhaustive
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
    trace("import", write_npz(tmp_path / "a.npz"), "-o", tmp_path / "a", "--tokenizer", BUNDLED)
    document = json.loads(trace("show", tmp_path / "a", "--step", "5", "--json").stdout)
    read = document["passages"]
    assert {passage["part"] for passage in read} == {"selected"}
    selection = set(selection_arrays()["positions"][5].ravel().tolist())
    assert sum(passage["tokens"] for passage in read) == len(selection)
    assert (document["refreshed"], document["notes"], document["missed"]) == ([5], [], [])
    assert document["audited"] == []
    assert {passage["mass"] for passage in read} == {None}
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
