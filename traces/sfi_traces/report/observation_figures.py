"""The report's figures of what SyncKV and FreeKV observed."""

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sfi_traces.report.head_map import axes, cells
from sfi_traces.report.panel import LEGEND, MARGIN, Panel
from sfi_traces.report.support_figures import faint
from sfi_traces.views import observation_captions as captions
from sfi_traces.views.labels import CLIP, WITHIN
from sfi_traces.views.observations import (
    HeadMap,
    corrections_of,
    cosines_of,
    drift_of,
    head_similarity_of,
)
from sfi_traces.views.view import View

LEAST_HEIGHT = 300
BESIDE = 0.44  # where a map ends that has something beside it
BAR = {"x": 0.385, "thickness": 12, "outlinewidth": 0, "tickformat": ".2f"}
MOST_NUMBERS = 64


def drift(view: View) -> Panel:
    """Draw the mean over layers and KV heads, and their spread."""
    data = drift_of(view)
    low, high = data.band
    edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    figure = go.Figure()
    figure.add_scatter(x=data.step, y=low, **edge)
    figure.add_scatter(x=data.step, y=high, fill="tonexty", fillcolor=faint(WITHIN), **edge)
    figure.add_scatter(
        x=data.step, y=data.mean, mode="lines", line={"color": WITHIN, "width": 2.5}, showlegend=False,
        hovertemplate="step %{x}: %{y:.3f}<extra></extra>",
    )  # fmt: skip
    figure.update_layout(
        height=360, margin=MARGIN,
        xaxis={"title": {"text": "decoding step"}, "rangemode": "tozero"},
        yaxis={"title": {"text": "overlap"}, "range": [0, 1]},
    )  # fmt: skip
    return Panel(captions.drift(view, data), figure)


def head_similarity(view: View) -> Panel:
    """Draw a cell for each two layers."""
    data = head_similarity_of(view)
    names = [f"layer {layer}" for layer in data.layers]
    matrix = data.matrix
    figure = go.Figure(
        go.Heatmap(
            z=matrix, x=names, y=names, colorscale="Viridis", xgap=1, ygap=1, hoverongaps=False,
            zmin=np.floor(10 * np.nanmin(matrix)) / 10, zmax=np.ceil(10 * np.nanmax(matrix)) / 10,
            colorbar={"thickness": 12, "outlinewidth": 0, "tickformat": ".2f"},
            texttemplate="%{z:.2f}" if matrix.size <= MOST_NUMBERS else None,
            hovertemplate="%{y}, %{x}<br>overlap %{z:.3f}<extra></extra>",
        )
    )  # fmt: skip
    layout = axes(data.layers)
    figure.update_layout({**layout, "height": max(360, layout["height"])}, margin=MARGIN)
    return Panel(captions.head_similarity(view, data), figure)


def query_cosine(view: View) -> Panel:
    """Draw the map, and beside it the lowest heads with FreeKV's thresholds."""
    data = cosines_of(view)
    figure = _beside(data.mean, float(np.nanmin(data.mean.value)), 1, "cosine")
    for (layer, head), (step, cosine) in data.lowest.items():
        figure.add_scatter(
            x=step, y=np.round(cosine, 4), mode="lines", name=f"layer {layer}, KV head {head}",
            line={"width": 1.5}, row=1, col=2,
        )  # fmt: skip
    for tau in data.below:
        line = {"dash": "dash", "color": CLIP}
        figure.add_hline(tau, line=line, annotation_text=f"tau {tau:g}", row=1, col=2)
    figure.update_xaxes(title_text="decoding step", row=1, col=2)
    return Panel(captions.query_cosine(data), figure)


def corrections(view: View) -> Panel:
    """Draw the map, and beside it a bar for each place in the sentence."""
    data = corrections_of(view)
    high = max(0.01, float(np.nanmax(data.share.value)))
    figure = _beside(data.share, 0, high, "corrected")
    figure.add_bar(
        x=[*data.since_slow], y=[*data.since_slow.values()], marker={"color": WITHIN},
        hovertemplate="%{x} steps: %{y:.1%}<extra></extra>", showlegend=False, row=1, col=2,
    )  # fmt: skip
    figure.update_xaxes(title_text="steps since the last slow one", type="category", row=1, col=2)
    figure.update_yaxes(tickformat=".0%", row=1, col=2)
    return Panel(captions.corrections(data), figure)


def _beside(found: HeadMap, low: float, high: float, word: str) -> go.Figure:
    # the map on the left, and room on the right
    figure = make_subplots(1, 2, column_widths=[BESIDE, 1 - BESIDE], horizontal_spacing=0.14)
    figure.add_trace(
        cells(found.value, found.layers, found.heads, low, high, word), row=1, col=1
    ).update_traces(colorbar=BAR)
    layout = axes(found.layers)
    for name in ("xaxis", "yaxis"):
        figure.update_layout({name: layout[name]})
    height = max(LEAST_HEIGHT, layout["height"])
    return figure.update_layout(height=height, margin=MARGIN, legend=LEGEND)
