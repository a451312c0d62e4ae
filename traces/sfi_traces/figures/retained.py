"""Retained mass by layer and KV head."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.style import new_figure, title
from sfi_traces.views import captions
from sfi_traces.views.figure_data import retained_mass
from sfi_traces.views.view import View

MOST_NUMBERS = 400  # cells with their number written in


def draw(view: View) -> Figure:
    """Draw a cell for each layer and KV head, with its number if there are few."""
    data = retained_mass(view)
    rows, columns = data.mass.shape
    width, height = 2.6 + 0.62 * columns, 1.9 + 0.34 * rows
    figure = new_figure(min(14, max(6.5, width)), min(14, max(3.6, height)))
    axes = figure.subplots()
    low = min(float(np.nanmin(data.mass)), 0.99)
    image = axes.imshow(data.mass, cmap="viridis", vmin=low, vmax=1, aspect="auto")
    if data.mass.size <= MOST_NUMBERS:
        for (row, column), one in np.ndenumerate(data.mass):
            shade = "black" if one > (low + 1) / 2 else "white"
            text = "" if np.isnan(one) else f"{one:.3f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=shade)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    axes.set_xticks(range(columns), map(str, data.heads))
    axes.set_yticks(range(rows), map(str, data.layers))
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
    title(figure, captions.retained(view, data), view)
    return figure
