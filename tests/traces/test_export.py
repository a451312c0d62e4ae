"""Tables as CSV and JSON lines give back what is in them."""

import csv
import json

import pytest

from sfi_traces.export.rows import csv_text, json_text, jsonl_text, table_text
from sfi_traces.model.trace import Trace
from sfi_traces.schema import TABLES
from tests.traces.made import make_trace
from tests.traces.small import fixed_trace, redact, rows


def silent(done: int, total: int) -> None:
    """Take progress and show nothing."""


trace = fixed_trace(steps=20, policy="sfi")


@pytest.mark.parametrize("name", TABLES)
def test_json_lines_give_every_row_back(trace, name):
    lines = "".join(table_text(trace, name, "jsonl", silent)).splitlines()
    assert [json.loads(line) for line in lines] == rows(trace, name)


@pytest.mark.parametrize("name", TABLES)
def test_csv_gives_every_row_back(trace, name):
    read = [*csv.DictReader("".join(table_text(trace, name, "csv", silent)).splitlines())]
    expected = rows(trace, name)
    assert len(read) == len(expected)
    for line, row in zip(read, expected, strict=True):
        assert list(line) == TABLES[name].names
        for column, value in row.items():
            if isinstance(value, str) or value is None:
                assert line[column] == (value or "")
            else:
                assert json.loads(line[column]) == value


def test_a_table_without_rows_is_its_names(tmp_path):
    trace = Trace.open(redact(make_trace(tmp_path / "run", steps=3)))
    assert "".join(table_text(trace, "prompts", "csv", silent)) == "request,position,token_id,token_text\n"
    assert "".join(table_text(trace, "prompts", "jsonl", silent)) == ""


def test_what_json_lacks_is_written_as_what_it_has():
    values = [1, 0.5, float("nan"), float("-inf"), None, True, "ä\n", [1, float("inf")], {"a": 2.0}]
    columns = [f"c{number}" for number in range(len(values))]
    plain = [1, 0.5, None, None, None, True, "ä\n", [1, None], {"a": 2.0}]
    (line,) = jsonl_text(columns, [[values]])
    assert json.loads(line) == dict(zip(columns, plain, strict=True))
    document = json.loads("".join(json_text(columns, [[values], [values]])))
    assert document["columns"] == columns
    assert document["rows"] == [dict(zip(columns, plain, strict=True))] * 2
    assert json.loads("".join(json_text(["a"], []))) == {"columns": ["a"], "rows": []}
    assert "".join(csv_text(["a", "b"], [[(None, [1, 2]), (True, 'x"y')]])) == 'a,b\n,"[1, 2]"\ntrue,"x""y"\n'
