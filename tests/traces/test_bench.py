"""The Parquet tables and figures of both benchmarks."""

import json

import pytest
from pyarrow import parquet

from sfi_traces.results.parquet import write_bench, write_kernel_bench
from sfi_traces.results.plots import plot_bench


def row(policy: str, context: int, batch: int, rate: float) -> dict:
    return {
        "policy": policy, "context": context, "batch": batch, "decode_tokens_per_second": rate,
        "decode_tokens_per_second_min": rate - 1, "decode_tokens_per_second_max": rate + 1,
        "repeat_rates": [rate, rate + 1], "slow_rate": None, "roofline_tokens_per_second": 50.0,
        "ragged": False,
    }  # fmt: skip


def kernel_row(op: str, retention: float, median: float, form: str | None = None) -> dict:
    return {
        "op": op, "backend": "torch", "retention": retention, "context": 16384, "batch": 16,
        "dtype": "bfloat16", "heads": 32, "kv_heads": 8, "head_dim": 128, "form": form,
        "median_us": median, "bytes": 1000, "gb_per_s": 1.0, "speedup_over_dense": 100 / median,
        "speedup_over_sdpa": 90 / median, "speedup_over_paper_like": None,
        "ideal_speedup": 1 / retention, "matches_reference": True,
    }  # fmt: skip


@pytest.fixture
def document() -> dict:
    return {
        "rows": [
            row(policy, context, batch, 1e4 / context + batch)
            for context in (4096, 8192)
            for batch in (1, 4)
            for policy in ("sfi", "full-kv", "quest", "transformers-static")
        ],
        "skipped": [],
        "notes": ["a note"],
        "model": {"name": "qwen3-0.6b", "dtype": "bfloat16"},
        "machine": {"processor": "a processor", "threads": 2, "copy_gb_per_s": 9.0},
    }


@pytest.fixture
def kernels(document) -> dict:
    fast = [kernel_row("fast", r, 100 * r + 1) for r in (0.125, 0.016, 1.0)]
    rows = [kernel_row("dense", 1.0, 100.0), kernel_row("dense.sdpa", 1.0, 90.0, "group as rows"), *fast]
    more = {"compiled": [], "backend": "torch", "interrupted": False, "versions": {"torch": "2"}}
    return document | more | {"rows": rows}


def types_of(path) -> dict[str, str]:
    return {field.name: str(field.type) for field in parquet.read_schema(path)}


@pytest.mark.parametrize(
    ("write", "name", "given", "types"),
    [
        (
            write_bench, "bench", "document",
            {"policy": "string", "batch": "int64", "ragged": "bool", "slow_rate": "double"},
        ),
        (
            write_kernel_bench, "kernel_bench", "kernels",
            {"op": "string", "form": "string", "bytes": "int64", "matches_reference": "bool",
             "speedup_over_paper_like": "double"},
        ),
    ],
    ids=["bench", "kernel_bench"],
)  # fmt: skip
def test_the_table_has_the_rows_with_their_types_and_the_rest(tmp_path, request, write, name, given, types):
    document = request.getfixturevalue(given)
    write(document, tmp_path / "x.tmp")
    table = parquet.read_table(tmp_path / "x.tmp")
    assert table.to_pylist() == document["rows"]
    found = types_of(tmp_path / "x.tmp")
    assert types.items() <= found.items()
    assert name == "kernel_bench" or found["repeat_rates"].startswith("list<")
    facts = json.loads(table.schema.metadata[name.encode()])
    assert (facts["machine"]["copy_gb_per_s"], facts["notes"], "rows" in facts) == (9.0, ["a note"], False)
    assert table.schema.metadata[b"schema_version"] == b"1"


def test_a_column_without_a_value_keeps_its_type(tmp_path, kernels):
    write_kernel_bench(kernels | {"rows": kernels["rows"][:1]}, tmp_path / "x.tmp")
    assert types_of(tmp_path / "x.tmp")["form"] == "string"


@pytest.fixture
def drawn(monkeypatch) -> list:
    """The figures that are saved."""
    figure = pytest.importorskip("matplotlib.figure")
    saved = []
    save = figure.Figure.savefig

    def kept(self, *arguments, **options):
        saved.append(self)
        return save(self, *arguments, **options)

    monkeypatch.setattr(figure.Figure, "savefig", kept)
    return saved


def test_the_figure_has_a_panel_for_each_batch(tmp_path, document, drawn):
    plot_bench(document, tmp_path / "x.tmp", kind="svg")
    assert (tmp_path / "x.tmp").read_bytes().startswith(b"<?xml")
    panels = drawn[0].axes
    assert [axes.get_title() for axes in panels] == ["batch 1", "batch 4"]
    lines = panels[1].get_lines()
    solid = {line.get_label(): line for line in lines if line.get_linestyle() == "-"}
    assert [*solid] == ["sfi", "full-kv", "quest", "transformers-static"]
    assert [*solid["sfi"].get_xdata()] == [4096, 8192]
    assert [*solid["sfi"].get_ydata()] == [1e4 / 4096 + 4, 1e4 / 8192 + 4]
    dashed = [line for line in lines if line.get_linestyle() == "--"]
    assert [line.get_color() for line in dashed] == [
        solid[policy].get_color() for policy in ("sfi", "full-kv", "quest")
    ]
    assert [*dashed[0].get_ydata()] == [50, 50]
