"""FreeKV's corrections: by layer and KV head, and by steps since the last slow one."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.head_map import draw_cells, label_heads, sized_figure
from sfi_traces.figures.style import plain, title
from sfi_traces.views import observation_captions as captions
from sfi_traces.views.labels import WITHIN
from sfi_traces.views.observations import corrections_of
from sfi_traces.views.view import View

BARS = 5.0  # inches


def draw(view: View) -> Figure:
    """Draw the map, and beside it a bar for each place in the sentence."""
    data = corrections_of(view)
    value = data.share.value
    figure = sized_figure(*value.shape, beside=BARS)
    cells, bars = figure.subplots(1, 2)
    draw_cells(cells, value, 0, max(0.01, float(np.nanmax(value))))
    label_heads(cells, data.share.layers, data.share.heads)
    bars.bar([*data.since_slow], [*data.since_slow.values()], color=WITHIN)
    bars.set_xlabel("steps since the last slow one")
    bars.set_ylabel("share corrected")
    plain(bars)
    title(figure, captions.corrections(data), view)
    return figure
