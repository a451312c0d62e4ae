"""The benchmark's Parquet table and figure."""

import json

import pytest
from pyarrow import parquet

from sfi_core.errors import BackendError, ConfigError
from sfi_traces.figures import style
from sfi_traces.figures.style import check_plot
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
    }  # fmt: skip


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


def test_the_figure_names_the_machine_and_the_paper(tmp_path, document):
    """Text stays text in an SVG where fonts are not turned into paths."""
    matplotlib = pytest.importorskip("matplotlib")
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        write_plot(document, tmp_path / "x.svg", kind="svg")
    text = (tmp_path / "x.svg").read_text()
    for words in (
        "a processor, 2 threads",
        "paper, Table 1",
        "over PyTorch SDPA",
        "copy, measured",
    ):
        assert words in text
    assert "paper-like" not in text  # there is no such row


def test_one_retention_makes_a_figure_too(tmp_path, document):
    pytest.importorskip("matplotlib")
    document["rows"] = [row("fast", 0.3, 50.0)]
    write_plot(document, tmp_path / "x.tmp", kind="png")
    assert (tmp_path / "x.tmp").stat().st_size > 1000


def test_a_figure_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plot must end in one of .* got x\.jpg"):
        check_plot(tmp_path / "x.jpg")


def test_a_figure_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(style, "find_spec", lambda _: None)
    with pytest.raises(BackendError, match=r"pip install 'sfi-toolkit\[plots\]'"):
        check_plot(tmp_path / "x.png")
