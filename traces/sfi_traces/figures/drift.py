"""Attention drift (SyncKV, Fig. 2a): overlap with the prompt's support, by step."""

from matplotlib.figure import Figure

from sfi_traces.figures.style import new_figure, plain, title
from sfi_traces.views import observation_captions as captions
from sfi_traces.views.labels import WITHIN
from sfi_traces.views.observations import drift_of
from sfi_traces.views.view import View


def draw(view: View) -> Figure:
    """Draw the mean over layers and KV heads, and their spread."""
    data = drift_of(view)
    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    axes.fill_between(data.step, *data.band, color=WITHIN, alpha=0.18, linewidth=0)
    axes.plot(data.step, data.mean, color=WITHIN, linewidth=2, marker="o", markersize=2.5)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.set_xlabel("decoding step")
    axes.set_ylabel("overlap coefficient")
    plain(axes)
    title(figure, captions.drift(view, data), view)
    return figure
