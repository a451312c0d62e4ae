"""SQL over a trace's tables."""

import pytest

from sfi_core.errors import ConfigError
from sfi_traces.model.trace import Trace
from sfi_traces.read.query import Query
from tests.traces.made import make_trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    folder = tmp_path_factory.mktemp("query") / "run"
    return Trace.open(make_trace(folder, steps=40, policy="sfi"))


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
        ("SELECT * FROM read_csv('/etc/hosts')", "query fails: Permission Error"),
        ("INSERT INTO steps (step) VALUES (1)", "query fails: Catalog Error"),
    ],
)
def test_a_query_that_fails_is_one_line_of_duckdbs(trace, sql, words):
    with pytest.raises(ConfigError) as caught:
        found(trace, sql)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
    assert "LINE 1" not in str(caught.value)


def test_a_row_that_fails_on_the_way_is_a_line_too(trace):
    query = Query(trace, "SELECT CASE WHEN range = 5000 THEN error('here') ELSE range END FROM range(9000)")
    with pytest.raises(ConfigError, match="query fails: Invalid Input Error: here"):
        list(query.batches())
