"""Support stability (the paper's Figure 1A): overlap of every two steps' supports."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.style import new_figure, title
from sfi_traces.summary.lags import color_range
from sfi_traces.views import captions
from sfi_traces.views.labels import step_ticks
from sfi_traces.views.view import View

MOST_LABELS = 64
MOST_LINES = 24


def draw(view: View) -> Figure:
    """Draw a cell for every two audited steps."""
    supports = view.supports.thinned()
    overlap, count = supports.overlap, supports.steps
    figure = new_figure(9.6, 8.8)
    axes = figure.subplots()
    low, high = color_range(overlap)
    image = axes.imshow(overlap, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    sentence = view.steps.sentence[view.steps.rows(supports.step_N)]
    edges = np.flatnonzero(np.diff(sentence)) + 0.5
    ends = np.array([-0.5, *edges, count - 0.5])
    # lines cross the whole map; many lines only frame each sentence
    begin, end = (-0.5, count - 0.5) if len(edges) <= MOST_LINES else (ends[:-2], ends[2:])
    for lines in (axes.vlines, axes.hlines):
        lines(edges, begin, end, color="white", linewidth=1 if count <= MOST_LABELS else 0.6)
    entries, labels = step_ticks(view.steps, supports.step_N, MOST_LABELS)
    size = 7.5 if len(entries) <= MOST_LABELS * 2 // 3 else 6.5
    axes.set_xticks(entries, labels, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticks(entries, labels, fontsize=size, parse_math=False)
    axes.tick_params(length=2, pad=1.5)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(
        image, ax=axes, shrink=0.6, aspect=30, pad=0.015, extend="max" if high < 1 else "neither"
    )
    bar.set_label("overlap coefficient", fontsize=9)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    title(figure, captions.stability(view, supports), view)
    return figure
