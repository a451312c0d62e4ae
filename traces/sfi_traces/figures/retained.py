"""Retained mass by layer and KV head."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.head_map import draw_cells, label_heads, sized_figure
from sfi_traces.figures.style import title
from sfi_traces.views import captions
from sfi_traces.views.figure_data import retained_mass
from sfi_traces.views.view import View


def draw(view: View) -> Figure:
    """Draw a cell for each layer and KV head."""
    data = retained_mass(view)
    figure = sized_figure(*data.mass.shape)
    axes = figure.subplots()
    draw_cells(axes, data.mass, min(float(np.nanmin(data.mass)), 0.99), 1)
    label_heads(axes, data.layers, data.heads)
    title(figure, captions.retained(view, data), view)
    return figure
