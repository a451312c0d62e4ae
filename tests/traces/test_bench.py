"""The figures of both benchmarks."""

import pytest

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
