"""Overlap by lag: how fast supports drift within a sentence, and how far they jump across a boundary."""

from matplotlib.figure import Figure

from sfi_traces.figures.style import new_figure, plain, title
from sfi_traces.views import captions
from sfi_traces.views.labels import ACROSS, WITHIN
from sfi_traces.views.view import View


def draw(view: View) -> Figure:
    """Draw the overlap of pairs within a sentence and across a boundary, and the number of pairs."""
    lines = view.lags
    figure = new_figure(9, 5.6)
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for line, color in zip(lines, (WITHIN, ACROSS), strict=True):
        label = f"{line.name}, mean {line.overall:.3f} of {line.pairs.sum():,} pairs"
        axes.fill_between(line.lag, line.low, line.high, color=color, alpha=0.18, linewidth=0)
        axes.plot(
            line.lag, line.mean, color=color, linewidth=2, marker="o", markersize=2.5, label=label
        )
        below.plot(line.lag, line.pairs, color=color, linewidth=1.2)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.set_ylabel("overlap coefficient")
    axes.legend(frameon=False, fontsize=9)
    below.set_ylabel("pairs")
    below.set_ylim(bottom=0)
    below.set_xlabel("lag: steps apart")
    plain(axes)
    plain(below)
    title(figure, captions.lag(view), view)
    return figure
