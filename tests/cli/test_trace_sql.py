"""`sfi trace sql` from the outside."""

import csv
import json

import pytest

from sfi_cli.commands.trace import sql
from tests.cli.trace_commands import trace
from tests.traces.small import fixed_folder

recorded = fixed_folder(steps=30, policy="sfi")
QUERY = "SELECT reason, count(*) AS n, avg(read_ratio) AS read FROM steps GROUP BY 1 ORDER BY 1"


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
    monkeypatch.setattr(sql, "MOST_ROWS", 3)
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
