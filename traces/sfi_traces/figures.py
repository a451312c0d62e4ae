"""Figures of a trace by matplotlib, one for each kind, and the style of all figures."""

import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfi_core.errors import ConfigError, require
from sfi_traces.model.request import Request
from sfi_traces.model.supports import thinning
from sfi_traces.views import captions, figure_data
from sfi_traces.views.captions import ACROSS, CLIP, SLOW, WITHIN, Caption, subject, visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DPI = 150
MUTED = "#5b6570"
CHARACTERS_PER_INCH = 16  # of a note
MARGIN, TITLE, LINE = 0.12, 0.27, 0.165  # inches
MOST_LABELS, MOST_LINES = 64, 24  # of the heat map
MOST_NUMBERS = 400  # cells of retained mass with their number written in


def check_matplotlib(what: str) -> None:
    """Raise `BackendError` if matplotlib is not installed; `what`, such as "plots", is in the message."""
    require(f"{what} need", "plots", "matplotlib")


def check_plot(path: Path) -> None:
    """Raise `ConfigError` unless a path ends in .png or .svg, `BackendError` without matplotlib."""
    suffixes = tuple(f".{form}" for form in FORMATS)
    if path.suffix not in suffixes:
        raise ConfigError(f"plot must end in one of {suffixes}, got {path.name}")
    check_matplotlib("plots")


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure; sizes are in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    return Figure(figsize=(width, height), layout="constrained")


def _titled(figure: "Figure", caption: Caption, request: Request) -> "Figure":
    # with the caption and the run's name above
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415 - an extra

    width, height = figure.get_size_inches()
    lines = [subject(request), *textwrap.wrap(caption.note, int(width * CHARACTERS_PER_INCH))]
    left = MARGIN / width
    figure.text(left, 1 - MARGIN / height, caption.title, fontsize=12, fontweight="bold", va="top")
    figure.text(
        left, 1 - (MARGIN + TITLE) / height, "\n".join(lines), fontsize=8.5, color=MUTED, va="top",
        linespacing=1.35, parse_math=False,
    )  # fmt: skip
    free = 1 - (2 * MARGIN + TITLE + LINE * len(lines)) / height
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, free)))
    return figure


def _colorbar(figure: "Figure", image: Any, axes: Any, **options: Any) -> Any:
    # without a frame
    bar = figure.colorbar(image, ax=axes, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return bar


def plain(axes: "Axes") -> None:
    """Remove the frame at the top and right, and add a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Any, path: Path, *, kind: str) -> None:
    """Write a figure as "png" or "svg", whatever the path ends in."""
    with warnings.catch_warnings():  # characters that no font has are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, format=kind, dpi=DPI)


def heatmap(request: Request) -> Any:
    """Draw the overlap of every two audited steps' supports (the paper's Figure 1A)."""
    supports = request.supports.thinned()
    overlap, count = supports.overlap, supports.steps
    figure = new_figure(9.6, 8.8)
    axes = figure.subplots()
    low, high = figure_data.color_range(overlap)
    image = axes.imshow(overlap, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    rows = request.steps.rows(supports.step_N)
    edges = np.flatnonzero(np.diff(request.steps.sentence[rows])) + 0.5
    ends = np.array([-0.5, *edges, count - 0.5])
    # lines cross the whole map; many lines only frame each sentence
    begin, end = (-0.5, count - 0.5) if len(edges) <= MOST_LINES else (ends[:-2], ends[2:])
    for lines in (axes.vlines, axes.hlines):
        lines(edges, begin, end, color="white", linewidth=1 if count <= MOST_LABELS else 0.6)
    entries = range(0, count, thinning(count, MOST_LABELS))
    labels = [visible(request.steps.text[row]) or str(request.steps.step[row]) for row in rows[entries]]
    axes.set_xticks(entries, labels, rotation=90, fontsize=7, parse_math=False)
    axes.set_yticks(entries, labels, fontsize=7, parse_math=False)
    axes.tick_params(length=2, pad=1.5)
    axes.spines[:].set_visible(False)
    extend = "max" if high < 1 else "neither"
    bar = _colorbar(figure, image, axes, shrink=0.6, aspect=30, pad=0.015, extend=extend)
    bar.set_label("overlap coefficient", fontsize=9)
    return _titled(figure, captions.stability(request, supports), request)


def lag(request: Request) -> Any:
    """Draw the overlap of pairs within a sentence and across a boundary, and the number of pairs."""
    lines = figure_data.lag_lines(request)
    figure = new_figure(9, 5.6)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for line, color in zip(lines, (WITHIN, ACROSS), strict=True):
        label = f"{line.name}, mean {line.overall:.3f} of {line.pairs.sum():,} pairs"
        axes.fill_between(line.lag, line.low, line.high, color=color, alpha=0.18, linewidth=0)
        axes.plot(line.lag, line.mean, color=color, linewidth=2, marker="o", markersize=2.5, label=label)
        below.plot(line.lag, line.pairs, color=color, linewidth=1.2)
    chance = request.supports.chance
    axes.axhline(chance, color=CLIP, linestyle="--", linewidth=1.2, label=f"two random supports, {chance:.3f}")
    axes.set_ylim(figure_data.axis_range(chance, *(np.hstack([line.low, line.high, line.mean]) for line in lines)))
    axes.set_xlim(left=0)
    axes.set_ylabel("overlap coefficient")
    axes.legend(frameon=False, fontsize=9)
    below.set(ylabel="pairs", xlabel="lag: steps apart")
    below.set_ylim(bottom=0)
    plain(axes)
    plain(below)
    return _titled(figure, captions.lag(request), request)


def lambda_star(request: Request) -> Any:
    """Draw the median, the spread over layers and KV heads, and the clip."""
    data = figure_data.lambda_over_time(request)
    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    label = "median, 10 to 90 % of layers and KV heads"
    axes.fill_between(data.step, data.low, data.high, color=WITHIN, alpha=0.2, linewidth=0)
    axes.plot(data.step, data.median, color=WITHIN, linewidth=1.2, marker="o", markersize=2.5, label=label)
    axes.axhline(data.clip, color=CLIP, linestyle="--", linewidth=1.2, label=f"clip at {data.clip:g}")
    axes.set_ylim(0, 1.12 * max(data.clip, data.high.max()))
    axes.set(xlabel="decoding step", ylabel="lambda*")
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    plain(axes)
    return _titled(figure, captions.lambda_star(data), request)


def retained(request: Request) -> Any:
    """Draw a cell for each layer and KV head, with its number if there are few."""
    mass, steps = figure_data.retained_mass(request)
    shown = figure_data.HeadMap.of(mass)
    rows, columns = shown.value.shape
    width, height = 2.6 + 0.62 * columns, 1.9 + 0.34 * rows
    figure = new_figure(min(14, max(6.5, width)), min(14, max(3.6, height)))
    axes = figure.subplots()
    low = min(float(np.nanmin(shown.value)), 0.99)
    image = axes.imshow(shown.value, cmap="viridis", vmin=low, vmax=1, aspect="auto")
    if shown.value.size <= MOST_NUMBERS:
        for (row, column), value in np.ndenumerate(shown.value):
            shade = "black" if value > (low + 1) / 2 else "white"
            text = "" if np.isnan(value) else f"{value:.3f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=shade)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    _colorbar(figure, image, axes, aspect=30, pad=0.02)
    axes.set_xticks(range(columns), map(str, shown.heads))
    axes.set_yticks(range(rows), map(str, shown.layers))
    axes.set(xlabel="KV head", ylabel="layer")
    return _titled(figure, captions.retained(mass, steps), request)


def timeline(request: Request) -> Any:
    """Draw a bar for each step, its phases stacked."""
    data = figure_data.step_phases(request)
    figure = new_figure(11, 5.4)
    axes = figure.subplots()
    edges = np.array([*data.step, data.step[-1] + data.per_bar]) - 0.5
    base = np.zeros(len(data.step))
    for name, spent_us in data.phases.items():
        top = base + spent_us / 1000
        axes.stairs(top, edges, baseline=base, fill=True, color=figure_data.PHASES[name], label=name)
        base = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.02 * base.max())
    if len(data.slow) < len(data.step) * data.per_bar:
        axes.tick_params(axis="x", pad=7)
        axes.plot(
            data.slow, np.full(len(data.slow), -0.012), "^", color=SLOW, markersize=3.5, markeredgewidth=0,
            transform=axes.get_xaxis_transform(), clip_on=False, label="slow step",
        )  # fmt: skip
    axes.set(xlabel="decoding step", ylabel="milliseconds")
    plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False)
    return _titled(figure, captions.timeline(data), request)


# each raises `TraceError` for a trace that lacks its data; the message names the option that records it
KINDS: dict[str, Callable[[Request], Any]] = {
    "heatmap": heatmap, "lag": lag, "lambda": lambda_star, "retained": retained, "timeline": timeline,
}  # fmt: skip
