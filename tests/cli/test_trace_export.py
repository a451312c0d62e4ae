"""`sfi trace export` from the outside."""

import gzip
import json

import pytest

from sfi_core.errors import TraceError
from sfi_traces.export import perfetto
from sfi_traces.schema import TABLES
from tests.cli.trace_commands import trace
from tests.traces.small import fixed_folder

recorded = fixed_folder(steps=30, policy="sfi")


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
    assert {event["ph"] for event in events} == set("XCMsf")
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
