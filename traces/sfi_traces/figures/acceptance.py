"""Drafted tokens that a lossless run kept: by place in the sentence, and by depth in the draft."""

from matplotlib.figure import Figure

from sfi_traces.figures.style import new_figure, plain, title
from sfi_traces.views.acceptance import AXES, acceptance_of, caption
from sfi_traces.views.labels import WITHIN
from sfi_traces.views.view import View


def draw(view: View) -> Figure:
    """Draw a bar for each place, and beside them one for each depth, with how many tokens it stands for."""
    data = acceptance_of(view)
    figure = new_figure(10, 4.6)
    for axes, (side, label) in zip(figure.subplots(1, 2, sharey=True), AXES.items(), strict=True):
        bars = data.sides[side]
        drawn = axes.bar([bar.name for bar in bars], [bar.share for bar in bars], color=WITHIN)
        axes.bar_label(drawn, [f"{bar.tested:,}" for bar in bars], fontsize=7.5)
        axes.set_ylim(0, 1.06)
        axes.set_xlabel(label)
        plain(axes)
        if side == "places":
            axes.set_ylabel("share of the tested tokens that was kept")
    title(figure, caption(data), view)
    return figure
