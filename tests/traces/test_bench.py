"""The figure of a benchmark."""

import pytest

from sfi_traces.results.plots import plot_bench


def row(policy: str, context: int, batch: int, rate: float) -> dict:
    return {
        "policy": policy, "context": context, "batch": batch, "decode_tokens_per_second": rate,
        "decode_tokens_per_second_min": rate - 1, "decode_tokens_per_second_max": rate + 1,
        "repeat_rates": [rate, rate + 1], "slow_rate": None, "roofline_tokens_per_second": 50.0,
        "ragged": False,
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
