"""Query cosine by layer and KV head (FreeKV, Fig. 3a), and its course in the lowest heads (Fig. 3c)."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.head_map import draw_cells, label_heads, sized_figure
from sfi_traces.figures.style import plain, title
from sfi_traces.views import observation_captions as captions
from sfi_traces.views.labels import CLIP
from sfi_traces.views.observations import cosines_of
from sfi_traces.views.view import View

COURSE = 6.0  # inches


def draw(view: View) -> Figure:
    """Draw the map, and beside it the lowest heads with FreeKV's thresholds."""
    data = cosines_of(view)
    value = data.mean.value
    figure = sized_figure(*value.shape, beside=COURSE)
    cells, course = figure.subplots(1, 2)
    draw_cells(cells, value, float(np.nanmin(value)), 1)
    label_heads(cells, data.mean.layers, data.mean.heads)
    for (layer, head), (step, cosine) in data.lowest.items():
        course.plot(step, cosine, linewidth=1.1, label=f"layer {layer}, KV head {head}")
    for tau in data.below:
        course.axhline(tau, color=CLIP, linestyle="--", linewidth=1.2, label=f"tau {tau:g}")
    course.set_ylim(top=1.01)
    course.set_xlabel("decoding step")
    course.set_ylabel("query cosine")
    figure.legend(loc="outside lower left", ncols=6, frameon=False, fontsize=8)
    plain(course)
    title(figure, captions.query_cosine(data), view)
    return figure
