"""Figures of a trace: what is on their axes, and that they are drawn."""

import numpy as np
import pytest

from sfi_core.errors import BackendError, TraceError
from sfi_traces import Trace
from sfi_traces.figures import KINDS, check_matplotlib, save
from sfi_traces.model.request import Request
from sfi_traces.views.figure_data import REST, HeadMap, lag_lines, lambda_over_time, retained_mass, step_phases
from tests.traces.made import TOP, WORDS, make_trace
from tests.traces.small import rewrite

pytest.importorskip("matplotlib")


@pytest.fixture
def sfi(tmp_path) -> Request:
    return Request(Trace.open(make_trace(tmp_path / "sfi", steps=40, policy="sfi")))


@pytest.fixture
def full(tmp_path) -> Request:
    return Request(Trace.open(make_trace(tmp_path / "full", steps=30, requests=2)))


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.texts]


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_written_and_says_of_which_run_it_is(tmp_path, kind):
    view = Request(Trace.open(make_trace(tmp_path / "t", steps=40, policy="freekv")))
    figure = KINDS[kind](view)
    title, note = texts(figure)
    assert title
    assert note.startswith("made-up, policy freekv, request 0, 200 prompt tokens, 40 steps\n")
    save(figure, tmp_path / "x.tmp", kind="png")
    assert (tmp_path / "x.tmp").read_bytes().startswith(b"\x89PNG")
    save(figure, tmp_path / "x.tmp", kind="svg")
    assert (tmp_path / "x.tmp").read_bytes().startswith(b"<?xml")


def test_the_heat_map_has_the_overlap_with_the_text_along_its_axes(full):
    figure = KINDS["heatmap"](full)
    axes = figure.axes[0]
    assert (axes.images[0].get_array() == full.supports.overlap).all()
    words = [WORDS[step % 10] if step % 10 < 9 else "." for step in range(30)]
    assert labels(axes.xaxis) == labels(axes.yaxis) == words
    lines = [path.vertices.tolist() for lines in axes.collections for path in lines.get_paths()]
    assert lines == [[[x, -0.5], [x, 29.5]] for x in (9.5, 19.5)] + [[[-0.5, y], [29.5, y]] for y in (9.5, 19.5)]
    assert f"Top-{TOP} of dense attention, mean over 2 layers x 2 KV heads." in texts(figure)[1]
    low, high = axes.images[0].get_clim()
    others = full.supports.overlap[~np.eye(30, dtype=bool)]
    assert others.min() - 0.1 < low <= others.min()
    assert others.max() <= high < others.max() + 0.1


def test_tokens_that_look_like_markup_or_that_no_font_has_are_drawn_as_they_are(full, tmp_path):
    odd = ["$\\frac$", "\n", "  ", "漢字", "\x00", "a" * 99, "_{x}$", "<b>"]
    rewrite(full.trace.path, "steps", lambda rows: [row | {"token_text": odd[row["step"] % 8]} for row in rows])
    figure = KINDS["heatmap"](Request(full.trace))
    assert labels(figure.axes[0].xaxis)[:8] == [
        "$\\frac$", "\\n", "␣␣", "漢字", "\\x00", "a" * 13 + "…", "_{x}$", "<b>",
    ]  # fmt: skip
    save(figure, tmp_path / "x.tmp", kind="svg")


def test_the_lag_figure_has_a_line_and_a_band_for_each_kind_of_pairs(sfi):
    axes = KINDS["lag"](sfi).axes[0]
    for line, drawn, band in zip(lag_lines(sfi), axes.lines[:2], axes.collections, strict=True):
        assert drawn.get_xdata().tolist() == line.lag.tolist()
        assert drawn.get_ydata().tolist() == line.mean.tolist()
        assert drawn.get_label().startswith(f"{line.name}, mean {line.overall:.3f} of ")
        edge = band.get_paths()[0].vertices[:, 1]
        assert {*line.low, *line.high} <= {*edge}


def test_the_lag_figure_is_scaled_to_its_data_and_draws_chance(sfi):
    axes = KINDS["lag"](sfi).axes[0]
    low, high = axes.get_ylim()
    sizes = (sfi.supports.position_NUK >= 0).sum(-1) / sfi.supports.length_N[:, None]
    drawn = np.concatenate(
        [[sizes.mean()], *(values for line in lag_lines(sfi) for values in (line.low, line.high, line.mean))]
    )
    assert low == pytest.approx(max(0, drawn.min() - 0.06 * np.ptp(drawn)))
    assert high == pytest.approx(min(1, drawn.max() + 0.06 * np.ptp(drawn)))
    assert axes.lines[-1].get_ydata() == pytest.approx([sizes.mean()] * 2)


def test_a_lambda_that_always_stands_at_its_clip_is_not_drawn(tmp_path):
    folder = make_trace(tmp_path / "run", steps=30, policy="sfi")
    rewrite(folder, "selections", lambda rows: [row | {"lambda_star": 0.02} for row in rows])
    with pytest.raises(TraceError, match=r"lambda\* at selector.lambda_clip, 0.02, in every refresh of request 0"):
        KINDS["lambda"](Request(Trace.open(folder)))


def test_the_lambda_figure_has_each_refresh_and_the_clip(sfi):
    axes = KINDS["lambda"](sfi).axes[0]
    drawn = [line.get_ydata() for line in axes.lines]
    assert lambda_over_time(sfi).median.tolist() in [list(data) for data in drawn]
    assert [0.02, 0.02] in [list(data) for data in drawn]
    assert axes.get_ylim()[0] == 0


def test_the_map_of_retained_mass_has_its_numbers(sfi):
    figure = KINDS["retained"](sfi)
    mass = HeadMap.of(retained_mass(sfi)[0]).value
    assert [text.get_text() for text in figure.axes[0].texts] == [f"{m:.3f}" for m in mass.ravel()]
    assert texts(figure)[0] == "Retained mass of fast steps"


def test_the_timeline_stacks_the_phases(sfi):
    figure = KINDS["timeline"](sfi)
    axes = figure.axes[0]
    data = step_phases(sfi)
    base = np.zeros(39)
    for (name, spent_us), patch in zip(data.phases.items(), axes.patches, strict=True):
        values, edges, baseline = patch.get_data()
        assert patch.get_label() == name
        assert (baseline == base).all()
        assert values == pytest.approx(base + spent_us / 1000)
        assert edges.tolist() == [step - 0.5 for step in range(1, 41)]
        base = values
    assert patch.get_label() == REST
    assert base == pytest.approx(sfi.steps.elapsed_us[1:] / 1000)
    assert "Step 0, the prefill, took 0.9 ms and is left out." in texts(figure)[1]


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("sfi_core.errors.find_spec", lambda _: None)
    with pytest.raises(BackendError, match=r"pip install -e '/.+\[plots\]'"):
        check_matplotlib("figures")
