"""The benchmark's Parquet table and figure."""

import json

import pytest
from pyarrow import parquet

from sfi_traces.results.kernel_bench import write_parquet, write_plot


def row(op: str, retention: float | None, median: float, **more) -> dict:
    return {
        "op": op, "backend": "torch", "retention": retention, "context": 16384, "batch": 16,
        "dtype": "bfloat16", "heads": 32, "kv_heads": 8, "head_dim": 128, "form": None,
        "median_us": median, "bytes": 1000, "gb_per_s": 1.0, "speedup_over_dense": 100 / median,
        "speedup_over_sdpa": 90 / median, "speedup_over_paper_like": None,
        "ideal_speedup": 1 / retention if retention else None, "matches_reference": True,
    } | more  # fmt: skip


@pytest.fixture
def document() -> dict:
    fast = [row("fast", r, 100 * r + 1) for r in (0.125, 0.016, 1.0)]
    return {
        "rows": [row("dense", 1.0, 100.0), row("dense.sdpa", 1.0, 90.0, form="group as rows"), *fast],
        "compiled": [],
        "backend": "torch",
        "interrupted": False,
        "notes": ["a note"],
        "machine": {"processor": "a processor", "threads": 2, "copy_gb_per_s": 9.0},
        "versions": {"torch": "2"},
    }


def test_the_table_has_the_rows_with_their_types_and_the_machine(tmp_path, document):
    write_parquet(document, tmp_path / "x.tmp")
    table = parquet.read_table(tmp_path / "x.tmp")
    assert table.to_pylist() == document["rows"]
    types = {field.name: str(field.type) for field in table.schema}
    assert types["op"] == types["form"] == "string"
    assert types["bytes"] == "int64"
    assert types["matches_reference"] == "bool"
    assert types["speedup_over_paper_like"] == "double"
    facts = json.loads(table.schema.metadata[b"kernel_bench"])
    assert facts["machine"]["copy_gb_per_s"] == 9.0
    assert facts["notes"] == ["a note"]
    assert table.schema.metadata[b"schema_version"] == b"1"
    document["rows"] = document["rows"][:1]
    write_parquet(document, tmp_path / "y.tmp")  # no row has a form: the column stays text
    assert str(parquet.read_schema(tmp_path / "y.tmp").field("form").type) == "string"


@pytest.mark.parametrize(("kind", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_the_figure_is_written_in_its_format(tmp_path, document, kind, start):
    pytest.importorskip("matplotlib")
    write_plot(document, tmp_path / "x.tmp", kind=kind)
    assert (tmp_path / "x.tmp").read_bytes().startswith(start)
