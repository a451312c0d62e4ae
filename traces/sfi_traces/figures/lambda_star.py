"""The prior's weight lambda* at each refresh."""

from matplotlib.figure import Figure

from sfi_traces.figures.style import new_figure, plain, title
from sfi_traces.views import captions
from sfi_traces.views.figure_data import lambda_over_time
from sfi_traces.views.labels import CLIP, WITHIN
from sfi_traces.views.view import View

MOST_BARS = 60  # beyond, error bars would hide each other


def draw(view: View) -> Figure:
    """Draw the median, the spread over layers and KV heads, and the clip."""
    data = lambda_over_time(view)
    figure = new_figure(9, 4.6)
    axes = figure.subplots()
    label = "median, 10 to 90 % of layers and KV heads"
    if len(data.step) <= MOST_BARS:
        spread = [data.median - data.low, data.high - data.median]
        axes.errorbar(
            data.step, data.median, yerr=spread, fmt="o", color=WITHIN, markersize=4, label=label
        )
    else:
        axes.fill_between(data.step, data.low, data.high, color=WITHIN, alpha=0.2, linewidth=0)
        axes.plot(data.step, data.median, color=WITHIN, linewidth=1.2, label=label)
    clip = data.clip
    axes.axhline(clip, color=CLIP, linestyle="--", linewidth=1.2, label=f"clip at {clip:g}")
    axes.set_ylim(0, 1.12 * max(clip, data.high.max()))
    axes.set_xlabel("decoding step")
    axes.set_ylabel("lambda*")
    figure.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=9)
    plain(axes)
    title(figure, captions.lambda_star(data), view)
    return figure
