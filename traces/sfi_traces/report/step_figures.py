"""The report's figures of lambda*, retained mass and time."""

import numpy as np
import plotly.graph_objects as go

from sfi_traces.report.panel import LEGEND, MARGIN, Panel, axes, cells
from sfi_traces.views import captions
from sfi_traces.views.figure_data import lambda_over_time, retained_mass, step_phases
from sfi_traces.views.labels import CLIP, PHASES, SLOW, WITHIN
from sfi_traces.views.view import View

MOST_BARS = 60  # beyond, error bars would hide each other


def retained(view: View) -> Panel:
    """Draw a cell for each layer and KV head."""
    data = retained_mass(view)
    shown = data.map
    low = min(float(np.nanmin(shown.value)), 0.99)
    figure = go.Figure(cells(shown, low, 1, "mass"))
    figure.update_layout(axes(shown.heads), margin=MARGIN)
    return Panel(captions.retained(view, data), figure)


def timeline(view: View) -> Panel:
    """Draw the phases of each step, stacked."""
    data = step_phases(view)
    figure = go.Figure()
    # stepped areas change midway between points; one more point at each end completes the outer bars
    middle = data.step + (data.per_bar - 1) / 2
    edge = 0.49 * data.per_bar
    at = np.concatenate([middle[:1] - edge, middle, middle[-1:] + edge])
    for name, spent_us in data.phases.items():
        figure.add_scatter(
            x=at, y=np.round(np.pad(spent_us, 1, mode="edge") / 1000, 4), name=name, stackgroup="phases",
            line={"width": 0, "shape": "hvh"}, fillcolor=PHASES[name], hovertemplate="%{y:.3f} ms",
        )  # fmt: skip
    if len(data.slow) < len(data.step) * data.per_bar:
        total = np.sum([*data.phases.values()], axis=0) / 1000
        above = total[np.searchsorted(data.step, data.slow, side="right") - 1] + 0.03 * total.max()
        figure.add_scatter(
            x=data.slow, y=above, mode="markers", name="slow step", hoverinfo="skip",
            marker={"symbol": "triangle-down", "size": 8, "color": SLOW},
        )  # fmt: skip
    figure.update_layout(
        height=400, margin=MARGIN, hovermode="x unified", legend=LEGEND,
        xaxis={
            "title": {"text": "decoding step"}, "showgrid": False, "range": [at[0], at[-1]],
            "hoverformat": ".0f", "unifiedhovertitle": {"text": "step %{x}"},
        },
        yaxis={"title": {"text": "milliseconds"}, "rangemode": "tozero"},
    )  # fmt: skip
    return Panel(captions.timeline(data), figure)


def lambda_star(view: View) -> Panel:
    """Draw the median, the spread over layers and KV heads, and the clip."""
    data = lambda_over_time(view)
    few = len(data.step) <= MOST_BARS
    figure = go.Figure()
    figure.add_scatter(
        x=data.step, y=data.median, mode="markers" if few else "lines", name="median, 10 to 90 %",
        error_y={
            "array": data.high - data.median, "arrayminus": data.median - data.low, "symmetric": False,
            "thickness": 1.2, "width": 2,
        },
        line={"color": WITHIN}, hovertemplate="step %{x}: %{y:.5f}<extra></extra>",
    )  # fmt: skip
    label = f"clip at {data.clip:g}"
    figure.add_hline(data.clip, line={"dash": "dash", "color": CLIP}, annotation_text=label)
    figure.update_layout(
        height=300, margin=MARGIN, xaxis={"title": {"text": "decoding step"}},
        yaxis={"title": {"text": "lambda*"}, "range": [0, 1.15 * max(data.clip, data.high.max())]},
    )  # fmt: skip
    return Panel(captions.lambda_star(data), figure)
