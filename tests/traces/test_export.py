"""Tables as CSV and JSON lines give back what is in them; the timeline keeps the Trace Event Format's rules."""

import csv
import json
from collections import Counter, defaultdict

import pytest

from sfi_traces.export import csv_text, json_text, jsonl_text, table_text
from sfi_traces.export.perfetto import perfetto_text
from sfi_traces.model.trace import Trace
from sfi_traces.schema import TABLES
from tests.traces.made import make_trace
from tests.traces.small import fixed_trace, redact, rewrite, rows, write_trace


def silent(done: int, total: int) -> None:
    """Take progress and show nothing."""


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


def timeline(trace: Trace) -> dict:
    return json.loads("".join(perfetto_text(trace, lambda done, total: None)))


def events(trace: Trace, phase: str) -> list[dict]:
    return [event for event in timeline(trace)["traceEvents"] if event["ph"] == phase]


trace = fixed_trace(steps=45, policy="sfi", sentence=9)


def test_every_event_has_what_the_format_asks_for(trace):
    document = timeline(trace)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    for event in document["traceEvents"]:
        assert event["ph"] in "XM"
        assert isinstance(event["name"], str)
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["cat"]


def test_slices_of_a_track_lie_within_each_other_or_apart(tmp_path):
    """However their ends round: leaves of two thirds of a microsecond fill their step."""
    timings = []
    for step in range(20):
        begin = step * 14 / 3
        whole = {"request": 0, "step": step, "layer": None, "name": "forward", "stream": "main"}
        timings.append(whole | {"begin_us": begin, "elapsed_us": 14 / 3})
        leaf = whole | {"layer": 0, "name": "attention.fast", "elapsed_us": 2 / 3}
        timings += [leaf | {"begin_us": begin + place * 2 / 3} for place in range(7)]
    steps = [{"request": 0, "step": step, "slow": False} for step in range(20)]
    trace = Trace.open(write_trace(tmp_path / "run", {"steps": steps, "timings": timings}))
    open_ends: dict[int, list[float]] = defaultdict(list)
    for event in events(trace, "X"):
        ends = open_ends[event["tid"]]
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        end = round(event["ts"] + event["dur"], 3)
        assert not ends or end <= ends[-1], event
        ends.append(end)


def test_every_span_is_on_the_track_of_its_stream(trace):
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["main", "steps of request 0"]
    slices = Counter(
        (e["name"], e["args"]["step"], e["args"].get("layer"), e["args"].get("bytes"), e["ts"], e["dur"])
        for e in events(trace, "X")
        if names[e["tid"]] == "main"
    )
    spans = rows(trace, "timings")
    assert sum(slices.values()) == len(spans)
    for span in spans:
        begin, end = span["begin_us"], span["begin_us"] + span["elapsed_us"]
        key = (span["name"], span["step"], span["layer"], span["bytes"], round(begin, 3))
        near = [event for event in slices if event[:5] == key]
        assert [event[5] for event in near] == pytest.approx([end - begin], abs=0.002)


def test_steps_are_slow_or_fast(trace):
    steps = rows(trace, "steps")
    slices = [event for event in events(trace, "X") if event["tid"] == 1]
    assert [e["name"] for e in slices] == ["slow" if s["slow"] else "fast" for s in steps]
    assert [e["cat"] for e in slices] == [e["name"] for e in slices]
    assert {(e["name"], e["cname"]) for e in slices} == {("slow", "terrible"), ("fast", "good")}
    assert [e["args"]["step"] for e in slices] == [s["step"] for s in steps]
    assert [e["args"]["attended_tokens"] for e in slices] == [s["attended_tokens"] for s in steps]
    assert slices[9]["args"]["reason"] == "trigger"
    assert "reason" not in slices[1]["args"]


def test_spans_of_a_rank_stay_in_its_process(tmp_path):
    folder = make_trace(tmp_path / "run", steps=25, sentence=9, policy="sfi", ranks=2)
    rewrite(folder, "timings", lambda timings: [row | {"rank": rank} for row in timings for rank in (0, 1)])
    both = Trace.open(folder)
    ranked = Counter(1 + row["rank"] for row in rows(both, "timings"))
    assert Counter(e["pid"] for e in events(both, "X") if e["name"] not in ("slow", "fast")) == ranked
    assert {*ranked} == {1, 2}


def spans(*given: tuple[int, str]) -> list[dict]:
    return [
        {
            "request": 0, "step": step, "layer": 0, "name": name, "stream": "main",
            "begin_us": 10.0 * place, "elapsed_us": 8.0,
        }
        for place, (step, name) in enumerate(given)
    ]  # fmt: skip


def test_a_span_on_another_stream_has_a_track_of_its_own_and_does_not_lengthen_the_step(tmp_path):
    given = spans((0, "attention.dense"), (1, "attention.fast"))
    late = {**given[0], "name": "pack", "stream": "stream 1", "begin_us": 6.0, "elapsed_us": 30.0}
    steps = [{"request": 0, "step": step, "slow": step == 0} for step in range(2)]
    trace = Trace.open(write_trace(tmp_path / "run", {"steps": steps, "timings": [*given, late]}))
    names = {e["tid"]: e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert names == {1: "steps of request 0", 2: "main", 3: "stream 1"}
    slices = [(e["ts"], e["dur"]) for e in events(trace, "X") if e["tid"] == 1]
    assert slices == [(0.0, 10.0), (10.0, 8.0)]


def test_a_redacted_trace_has_a_timeline_without_text(tmp_path):
    folder = redact(make_trace(tmp_path / "run", steps=5, policy="sfi"))
    steps = [event for event in events(Trace.open(folder), "X") if event["tid"] == 1]
    assert len(steps) == 5
    assert not any("token_text" in event["args"] for event in steps)
