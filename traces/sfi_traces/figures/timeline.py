"""Timeline: the time of each decoding step by phase."""

import numpy as np
from matplotlib.figure import Figure

from sfi_traces.figures.style import mark_slow, new_figure, plain, title
from sfi_traces.views import captions
from sfi_traces.views.figure_data import step_phases
from sfi_traces.views.labels import PHASES
from sfi_traces.views.view import View


def draw(view: View) -> Figure:
    """Draw a bar for each step, its phases stacked."""
    data = step_phases(view)
    figure = new_figure(11, 5.4)
    axes = figure.subplots()
    edges = np.array([*data.step, data.step[-1] + data.per_bar]) - 0.5
    base = np.zeros(len(data.step))
    for name, spent_us in data.phases.items():
        top = base + spent_us / 1000
        axes.stairs(top, edges, baseline=base, fill=True, color=PHASES[name], label=name)
        base = top
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1.02 * base.max())
    if len(data.slow) < len(data.step) * data.per_bar:
        mark_slow(axes, data.slow)
    axes.set_xlabel("decoding step")
    axes.set_ylabel("milliseconds")
    plain(axes)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=8, frameon=False)
    title(figure, captions.timeline(data), view)
    return figure
