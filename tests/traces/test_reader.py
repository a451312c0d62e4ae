"""Traces are read whole, also by SQL, or refused by name."""

import json
from pathlib import Path

import duckdb
import pytest
from pyarrow import parquet

from sfi_core.errors import ConfigError, TraceError
from sfi_traces.export import Query
from sfi_traces.model.trace import Trace
from sfi_traces.schema import MANIFEST, SCHEMA_VERSION, TABLES
from tests.traces.made import make_trace
from tests.traces.small import change_manifest, fixed_trace, spoil

trace = fixed_trace(steps=40, policy="sfi")


@pytest.fixture
def folder(tmp_path):
    return make_trace(tmp_path / "run", steps=12, policy="sfi")


def test_a_folder_without_a_manifest_is_no_trace(tmp_path):
    with pytest.raises(TraceError, match=rf"{tmp_path} is not a trace: it has no manifest.json"):
        Trace.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"name": "an extension"}'])
def test_a_manifest_of_something_else_is_refused(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(TraceError, match=r"has an unreadable manifest\.json"):
        Trace.open(folder)


def test_a_newer_schema_is_refused(folder):
    change_manifest(folder, schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(TraceError, match=r"has schema 2, this sfi reads 1 to 1; upgrade sfi"):
        Trace.open(folder)


def test_a_manifest_without_what_readers_need_is_refused(folder):
    document = json.loads((folder / MANIFEST).read_text())
    del document["config"], document["model"]
    (folder / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(TraceError, match=r"has a manifest\.json without model, config"):
        Trace.open(folder)


def test_a_missing_table_is_empty(folder):
    for part in Trace.open(folder).parts("logits"):
        part.unlink()
    trace = Trace.open(folder)
    assert not trace.has("logits")
    assert trace.table("logits").schema == TABLES["logits"]
    assert trace.connect().execute("SELECT count(*) FROM logits").fetchone() == (0,)
    columns = trace.connect().execute("DESCRIBE logits").fetchall()
    assert [column[0] for column in columns] == TABLES["logits"].names


def test_parts_are_one_table_in_order_and_temporary_ones_are_left_out(folder):
    (first,) = Trace.open(folder).parts("steps")
    rows = parquet.read_table(first)
    parquet.write_table(rows.slice(0, 5), folder / "steps" / "part-00001.parquet")
    parquet.write_table(rows, folder / "steps" / ".part-00002.parquet.tmp")
    trace = Trace.open(folder)
    steps = [*range(12), *range(5)]
    assert trace.table("steps", ["step"])["step"].to_pylist() == steps
    assert trace.connect().execute("SELECT count(*) FROM steps").fetchone() == (17,)


def test_a_truncated_part_is_named(folder):
    part = spoil(folder / "supports" / "part-00000.parquet")
    trace = Trace.open(folder)
    for read in (trace.connect, lambda: trace.table("supports")):
        with pytest.raises(TraceError, match=rf"{part} cannot be read; `sfi trace check"):
            read()
    assert len(trace.table("steps")) == 12


@pytest.mark.parametrize("name", ["budget=64", "run[1]", "it's", "a*b?", "två ord"])
def test_a_folder_may_have_any_name(tmp_path, name):
    """Neither a glob nor a Hive partition is read into it."""
    trace = Trace.open(make_trace(tmp_path / name, steps=3))
    assert trace.connect().execute("SELECT count(*) FROM steps").fetchone() == (3,)
    assert trace.table("steps").schema.names == TABLES["steps"].names


def test_a_column_that_an_older_trace_lacks_is_null_and_a_newer_one_is_left_out(folder):
    part = folder / "steps" / "part-00000.parquet"
    rows = parquet.read_table(part)
    newer = rows.append_column("novelty", rows["step"])
    parquet.write_table(newer.drop_columns(["audited"]), part)
    trace = Trace.open(folder)
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
def test_a_connection_reads_the_tables_and_touches_no_file(folder, tmp_path, statement):
    part, other = folder / "steps" / "part-00000.parquet", tmp_path / "other"
    before = part.read_bytes()
    connection = Trace.open(folder).connect()
    with pytest.raises(duckdb.Error):
        connection.execute(statement.format(part=part, other=other, manifest=folder / MANIFEST))
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
