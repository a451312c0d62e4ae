"""Intralayer similarity (SyncKV, Fig. 2c): overlap of the heads of each two layers."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.head_map import draw_cells
from sfi_traces.figures.style import new_figure, title
from sfi_traces.views import observation_captions as captions
from sfi_traces.views.observations import head_similarity_of
from sfi_traces.views.view import View


def draw(view: View) -> Figure:
    """Draw a cell for each two layers."""
    data = head_similarity_of(view)
    matrix, count = data.matrix, len(data.layers)
    side = min(11, max(4.6, 1.8 + 0.46 * count))
    figure = new_figure(side + 2.4, side + 1)
    axes = figure.subplots()
    low, high = np.floor(10 * np.nanmin(matrix)) / 10, np.ceil(10 * np.nanmax(matrix)) / 10
    draw_cells(axes, matrix, float(low), float(high), digits=2)
    axes.set_xticks(range(count), map(str, data.layers))
    axes.set_yticks(range(count), map(str, data.layers))
    axes.set_xlabel("layer")
    axes.set_ylabel("layer")
    title(figure, captions.head_similarity(view, data), view)
    return figure
