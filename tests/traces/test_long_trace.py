"""Long traces open: a shorter one, as `benchmarks/made_trace.py` writes them."""

import pytest
from pyarrow import parquet

from benchmarks.made_trace import Shape, write
from sfi_core.errors import TraceError
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.report import render
from sfi_traces.summary import summarize
from sfi_traces.summary.supports import selection_facts
from sfi_traces.views.words import step_words

plotly = pytest.importorskip("plotly.offline")
SHAPE = Shape(steps=1200, layers=6, heads=2, budget=64, prompt=2048, audit=64, audited_layers=3, top=32)
BYTES_A_STEP = 900  # of the page, without Plotly


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return Trace.open(write(tmp_path_factory.mktemp("long") / "run", SHAPE))


def test_the_report_grows_by_little_a_step(trace, monkeypatch):
    monkeypatch.setattr("sfi_traces.model.request.MOST_POSITIONS", 1 << 12)
    page = render(Request(trace))
    assert len(page) - len(plotly.get_plotlyjs()) < BYTES_A_STEP * SHAPE.steps
    assert "1 of 3 audited layers are drawn, evenly chosen." in page


def test_what_needs_no_position_of_a_selection_reads_none(trace, tmp_path):
    """Their column is spoiled in every part: whatever reads it fails."""
    copy = write(tmp_path / "spoiled", SHAPE)
    for part in sorted((copy / "selections").iterdir()):
        metadata = parquet.read_metadata(part)
        groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
        columns = [group.column(at) for group in groups for at in range(group.num_columns)]
        data = bytearray(part.read_bytes())
        for column in columns:
            if column.path_in_schema.startswith("positions"):
                begin, size = column.data_page_offset, column.total_compressed_size
                data[begin : begin + size] = bytes(size)
        part.write_bytes(data)
    spoiled = Trace.open(copy)
    facts, expected = (selection_facts(Request.of(recording)) for recording in (spoiled, trace))
    assert facts["lambda_star"]["mean"] == pytest.approx(expected["lambda_star"]["mean"])
    assert len(Request(spoiled).selections.step) > 0
    with pytest.raises(TraceError, match="has a damaged part"):
        step_words(Request(spoiled), SHAPE.steps - 1)


def test_the_positions_of_a_sample_are_read_once(trace, monkeypatch):
    """Health of a long trace looks at every n-th refresh, and not through DuckDB."""
    monkeypatch.setattr("sfi_traces.health.measures.MOST_POSITIONS", 1 << 12)
    read, rows, connect = [], Trace.rows, Trace.connect

    def counted(self, name, columns, where=None):
        table = rows(self, name, columns, where)
        if name == "selections" and "positions" in columns:
            read.append(len(table))
        return table

    def without_positions(self):
        connection, selections = connect(self), self.dataset("selections")
        schema = selections.schema
        connection.unregister("selections")
        narrowed = schema.remove(schema.get_field_index("positions"))
        connection.register("selections", selections.replace_schema(narrowed))
        return connection

    monkeypatch.setattr(Trace, "rows", counted)
    monkeypatch.setattr(Trace, "connect", without_positions)
    summary = summarize(trace)
    why = {rule["rule"]: rule["reason"] for rule in summary["health"]["not_judged"]}
    assert why["look_back"].startswith("it takes 8 steps, got ")  # it was measured
    refreshes = len(set(trace.table("selections", ["step"])["step"].to_pylist()))
    (rows_read,) = read
    assert 0 < rows_read < refreshes * SHAPE.layers * SHAPE.heads
