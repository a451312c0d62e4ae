"""Traces are read whole, also by SQL, or refused by name; `check` finds what is wrong, and nothing in a sound one."""

import json
import struct
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from pyarrow import parquet

from sfi_core.errors import ConfigError, TraceError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.export import Query
from sfi_traces.model.check import check
from sfi_traces.model.trace import Trace
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION, TABLES
from tests.traces.made import CONFIG, STOP, make_trace
from tests.traces.small import STEP, change_manifest, fixed_trace, redact, spoil, write_part, write_trace


def checked(folder) -> dict:
    return check(Trace.open(folder))


@pytest.fixture
def folder(tmp_path):
    return make_trace(tmp_path / "run", steps=30, requests=2, policy="sfi")


@pytest.mark.parametrize("policy", ["sfi", "full-kv", "streaming-llm"])
def test_a_whole_trace_is_sound(tmp_path, policy):
    trace = Trace.open(make_trace(tmp_path / "run", steps=30, requests=2, policy=policy))
    counts = {name: len(trace.table(name)) for name in TABLES}
    change_manifest(trace.path, tables=counts)
    document = checked(trace.path)
    assert (document["sound"], document["problems"], document["notes"]) == (True, [], [])
    assert document["steps_checked"]
    assert {table["table"]: table["rows"] for table in document["tables"]} == counts
    assert {table["table"]: table["expected_rows"] for table in document["tables"]} == counts
    steps = [{"request": request, "steps": 30, "last_step": 29} for request in range(2)]
    assert document["recorded"] == steps


def test_a_killed_trace_is_sound_and_not_finished(folder):
    (folder / "supports" / ".part-00001.parquet.tmp").write_bytes(b"PAR1")
    change_manifest(folder, finished=None)
    document = checked(folder)
    assert document["sound"]
    assert document["notes"] == [
        "not finished: the run was killed, or goes on",
        "left over from a write that broke off: supports/.part-00001.parquet.tmp",
    ]


def test_truncated_and_missing_parts_are_named(folder):
    supports = parquet.read_table(folder / "supports" / "part-00000.parquet")
    for number in (1, 3):
        parquet.write_table(supports, folder / "supports" / f"part-{number:05d}.parquet")
    spoil(folder / "supports" / "part-00001.parquet")
    change_manifest(folder, tables={"supports": 4 * len(supports)})
    document = checked(folder)
    assert not document["sound"]
    assert document["problems"] == [
        "supports/part-00001.parquet is damaged or truncated",
        "supports/part-00002.parquet is missing",
    ]
    assert document["steps_checked"]


def test_a_page_that_changed_is_found_by_its_checksum(folder):
    part = folder / "steps" / "part-00000.parquet"
    rows = parquet.read_table(part)
    parquet.write_table(rows, part, compression="none", use_dictionary=False, write_page_checksum=True)
    data = part.read_bytes()
    place = data.index(struct.pack("<d", rows["elapsed_us"][7].as_py()))
    part.write_bytes(data[:place] + b"\0" + data[place + 1 :])
    assert len(Trace.open(folder).table("steps")) == len(rows)
    assert checked(folder)["problems"] == ["steps/part-00000.parquet is damaged or truncated"]


def test_without_readable_steps_their_rules_are_not_checked(folder):
    spoil(folder / "steps" / "part-00000.parquet")
    document = checked(folder)
    assert (document["recorded"], document["steps_checked"]) == ([], False)
    assert document["notes"] == ["steps not checked against their tokens: their table has problems"]


def test_columns_that_are_missing_or_of_another_type_are_named(folder):
    part = folder / "steps" / "part-00000.parquet"
    rows = parquet.read_table(part).drop_columns(["reason"])
    place = rows.schema.get_field_index("step")
    wider = rows.set_column(place, "step", rows["step"].cast(pa.int64()))
    parquet.write_table(wider.append_column("novelty", rows["slow"]), part)
    document = checked(folder)
    assert document["problems"] == [
        "steps has a column of another type: step (int64, not int32)",
        "steps lacks the column reason",
    ]
    assert "steps has columns of a newer sfi: novelty" in document["notes"]
    assert not document["steps_checked"]


def test_rows_that_the_manifest_knows_of_are_missed(folder):
    change_manifest(folder, tables={"steps": 61, "logits": 54})
    assert checked(folder)["problems"] == ["steps must have 61 rows, got 60"]
    change_manifest(folder, finished=None)
    assert checked(folder)["sound"]


@pytest.mark.parametrize(("steps", "words"), [([0, 1, 3], "got 3 up to step 3"), ([0, 1, 1, 3], "got 4 up to step 3")])
def test_steps_are_consecutive(tmp_path, steps, words):
    rows = [{"request": 4, "step": step, "slow": False} for step in steps]
    document = checked(write_trace(tmp_path / "run", {"steps": rows}, policy="streaming-llm"))
    assert document["problems"] == [f"request 4: steps must be consecutive from 0 on, {words}"]
    assert document["notes"] == ["steps not checked against their tokens: some are missing"]


def test_token_ids_that_were_left_out_cannot_be_checked(folder):
    document = checked(redact(folder))
    assert document["sound"]
    assert document["notes"] == ["steps not checked against their tokens: token ids were left out (trace.redact_text)"]


SETTINGS = [
    {}, {"t_max": 3}, {"t_max": 0}, {"trigger_delay": 2, "t_max": 5}, {"min_gap": 4, "t_max": 6}, {"slow_start": 3},
    {"trigger_policy": "stride", "stride": 4}, {"trigger_policy": "t-max", "t_max": 5}, {"trigger_policy": "never"},
    {"trigger_policy": "always"},
]  # fmt: skip


def run_of(tokens: list[int], **settings) -> list[dict]:
    """Steps as the decoder would have taken them."""
    config = CONFIG | settings
    trigger = Trigger(frozenset({STOP}), SfiConfig(slow_start=1, min_gap=0, span=0).replace(**config))
    state, rows = RequestState(), []
    for step, token in enumerate(tokens):
        reason = trigger.reason(state) if step else "first"
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        rows.append(
            {
                "request": 0, "step": step, "slow": bool(reason), "reason": reason, "token_id": token,
                "trigger": token == STOP, "sentence": tokens[:step].count(STOP),
            }
        )  # fmt: skip
        state.finish_step(token)
    return rows


TOKENS = [1, 2, STOP, STOP, 3, 4, 5, 6, 7, 8, STOP, 9, 1, 2, 3, 4, STOP, 5]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_slow_steps_are_those_of_the_settings(tmp_path, settings):
    rows = run_of(TOKENS, **settings)
    folder = write_trace(tmp_path / "run", {"steps": rows}, config=CONFIG | settings)
    assert checked(folder)["problems"] == []
    other = {"trigger_policy": "stride", "stride": 7, "t_max": 2}
    assert not checked(change_manifest(folder, config=CONFIG | other))["sound"]


@pytest.mark.parametrize(
    ("step", "change", "line"),
    [
        (4, {"slow": False, "reason": ""}, "must be slow (trigger), got fast"),
        (6, {"slow": True, "reason": "t_max"}, "must be fast, got slow (t_max)"),
        (4, {"reason": "t_max"}, "must be slow (trigger), got slow (t_max)"),
        (0, {"slow": False, "reason": ""}, "must be slow (first), got fast"),
        (10, {"trigger": False}, "trigger must be True, got False"),
        (11, {"sentence": 2}, "sentence must be 3, got 2"),
    ],
)
def test_one_wrong_step_is_one_line(tmp_path, step, change, line):
    """T_max is far, so that what comes after stays right."""
    rows = run_of(TOKENS, t_max=64)
    rows[step] |= change
    folder = write_trace(tmp_path / "run", {"steps": rows}, config=CONFIG | {"t_max": 64})
    assert checked(folder)["problems"] == [f"request 0, step {step}: {line}"]


def test_only_the_first_of_many_wrong_steps_have_a_line(tmp_path):
    rows = [row | {"sentence": 99} for row in run_of(TOKENS)]
    problems = checked(write_trace(tmp_path / "run", {"steps": rows}))["problems"]
    assert len(problems) == 11
    assert problems[-1] == f"{len(TOKENS) - 10} more steps break a rule"


def test_rows_of_a_step_may_lie_in_any_part(tmp_path):
    rows = run_of(TOKENS)
    folder = write_trace(tmp_path / "run", {"steps": rows[9:]})
    write_part(folder, "steps", [STEP | row for row in rows[:9]], number=1)
    assert checked(folder)["sound"]


trace = fixed_trace(steps=40, policy="sfi")


@pytest.fixture
def short(tmp_path):
    return make_trace(tmp_path / "run", steps=12, policy="sfi")


def test_a_folder_without_a_manifest_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match=rf"{tmp_path} is not a trace: it has no manifest.json"):
        Trace.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"name": "an extension"}'])
def test_a_manifest_of_something_else_is_refused(short, text):
    (short / MANIFEST).write_text(text)
    with pytest.raises(TraceError, match=r"has an unreadable manifest\.json"):
        Trace.open(short)


def test_a_newer_schema_is_refused(short):
    change_manifest(short, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(TraceError, match=r"has schema 2, this sfi reads 1 to 1; upgrade sfi"):
        Trace.open(short)


def test_a_manifest_without_what_readers_need_is_refused(short):
    document = json.loads((short / MANIFEST).read_text())
    del document["config"], document["model"]
    (short / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(TraceError, match=r"has a manifest\.json without model, config"):
        Trace.open(short)


def test_a_missing_table_is_empty(short):
    for part in Trace.open(short).parts("logits"):
        part.unlink()
    trace = Trace.open(short)
    assert not trace.has("logits")
    assert trace.table("logits").schema == TABLES["logits"]
    assert trace.connect().execute("SELECT count(*) FROM logits").fetchone() == (0,)
    columns = trace.connect().execute("DESCRIBE logits").fetchall()
    assert [column[0] for column in columns] == TABLES["logits"].names


def test_parts_are_one_table_in_order_and_temporary_ones_are_left_out(short):
    (first,) = Trace.open(short).parts("steps")
    rows = parquet.read_table(first)
    parquet.write_table(rows.slice(0, 5), short / "steps" / "part-00001.parquet")
    parquet.write_table(rows, short / "steps" / ".part-00002.parquet.tmp")
    trace = Trace.open(short)
    steps = [*range(12), *range(5)]
    assert trace.table("steps", ["step"])["step"].to_pylist() == steps
    assert trace.connect().execute("SELECT count(*) FROM steps").fetchone() == (17,)


def test_a_truncated_part_is_an_error_that_says_what_names_it(short):
    spoil(short / "supports" / "part-00000.parquet")
    trace = Trace.open(short)
    for read in (trace.connect, lambda: trace.table("supports")):
        with pytest.raises(TraceError, match=rf"{short} has a damaged part; `sfi trace check {short}` names it"):
            read()
    assert len(trace.table("steps")) == 12


@pytest.mark.parametrize("name", ["budget=64", "run[1]", "it's", "a*b?", "två ord"])
def test_a_folder_may_have_any_name(tmp_path, name):
    """Neither a glob nor a Hive partition is read into it."""
    trace = Trace.open(make_trace(tmp_path / name, steps=3))
    assert trace.connect().execute("SELECT count(*) FROM steps").fetchone() == (3,)
    assert trace.table("steps").schema.names == TABLES["steps"].names


def test_a_column_that_an_older_trace_lacks_is_null_and_a_newer_one_is_left_out(short):
    part = short / "steps" / "part-00000.parquet"
    rows = parquet.read_table(part)
    newer = rows.append_column("novelty", rows["step"])
    parquet.write_table(newer.drop_columns(["audited"]), part)
    trace = Trace.open(short)
    assert trace.table("steps").schema.names == TABLES["steps"].names
    assert set(trace.table("steps", ["audited"])["audited"].to_pylist()) == {None}
    assert trace.connect().execute("SELECT count(audited), count(*) FROM steps").fetchone() == (0, 12)


@pytest.mark.parametrize(
    "statement",
    [
        "COPY steps TO '{other}'",
        "COPY (SELECT 1) TO '{part}' (FORMAT csv, USE_TMP_FILE false)",
        "SELECT * FROM read_text('{manifest}')",
        "SELECT * FROM '{part}'",
        "SELECT * FROM glob('{part}')",
        "ATTACH '{other}'",
        "EXPORT DATABASE '{other}'",
        "SET enable_external_access = true",
        "SET memory_limit = '1GB'",
        "INSERT INTO steps (step) VALUES (1)",
        "DELETE FROM steps",
    ],
)
def test_a_connection_reads_the_tables_and_touches_no_file(short, tmp_path, statement):
    part, other = short / "steps" / "part-00000.parquet", tmp_path / "other"
    before = part.read_bytes()
    connection = Trace.open(short).connect()
    with pytest.raises(duckdb.Error):
        connection.execute(statement.format(part=part, other=other, manifest=short / MANIFEST))
    assert not other.exists()
    assert part.read_bytes() == before


def test_an_audit_is_asked_for_by_its_option(tmp_path):
    without = Trace.open(make_trace(tmp_path / "without", steps=3, audit=None))
    with pytest.raises(TraceError, match="has no audit; record it with --audit 1"):
        without.require_audit()
    some = Trace.open(make_trace(tmp_path / "some", steps=9, audit=4, policy="sfi"))
    some.require_audit()
    with pytest.raises(TraceError, match="audits every 4 steps; record it with --audit 1"):
        some.require_audit(every_step=True)


def found(trace: Trace, sql: str) -> tuple[list[str], list[tuple]]:
    query = Query(trace, sql)
    return query.columns, [row for batch in query.batches() for row in batch]


def test_a_query_sees_the_tables_by_name(trace):
    columns, rows = found(trace, "SELECT reason, count(*) AS n FROM steps GROUP BY 1 ORDER BY 1")
    assert columns == ["reason", "n"]
    assert rows == [("", 36), ("first", 1), ("trigger", 3)]
    names = [name for (name,) in found(trace, "SHOW TABLES")[1]]
    assert names == ["logits", "prompts", "recalls", "selections", "steps", "supports", "timings", "verifications"]
    described = found(trace, "DESCRIBE supports")[1]
    assert ("positions", "INTEGER[]") in [row[:2] for row in described]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT nope FROM steps", 'query fails: Binder Error: Referenced column "nope" not found'),
        ("SELEC 1", 'query fails: Parser Error: syntax error at or near "SELEC"'),
        ("SELECT CAST(token_text AS INT) FROM steps", "query fails: Conversion Error"),
        ("", "query must be a statement of SQL, got an empty one"),
        ("-- nothing", "query must be a statement of SQL, got an empty one"),
        ("COPY steps TO 'x.csv'", "query fails: Permission Error"),
    ],
)
def test_a_query_that_fails_is_one_line_of_duckdbs(trace, sql, words):
    with pytest.raises(ConfigError) as caught:
        found(trace, sql)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert "LINE 1" not in str(caught.value)


def test_the_page_names_every_column():
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    for table, schema in TABLES.items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{table}` |")]
        unnamed = [name for name in schema.names if name not in ("request", "step") and f"`{name}`" not in row]
        assert unnamed == [], table
