"""The report's figures of overlap: of every two steps, and by lag."""

import html

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sfi_traces.report.panel import LEGEND, MARGIN, Panel
from sfi_traces.summary.lags import color_range
from sfi_traces.views import captions
from sfi_traces.views.labels import ACROSS, WITHIN, visible
from sfi_traces.views.view import View

MOST_STEPS = 500  # of the heat map
MOST_LINES = 24


def heatmap(view: View) -> Panel:
    """Draw a cell for every two audited steps, labeled by step and token."""
    supports = view.supports.thinned(MOST_STEPS)
    rows = view.steps.rows(supports.step_N)
    labels = [
        html.escape(f"{step} {visible(view.steps.text[row])}".strip(), quote=False)
        for step, row in zip(supports.step_N, rows, strict=True)
    ]
    low, high = color_range(supports.overlap)
    percent = np.round(100 * supports.overlap).astype(np.uint8)
    figure = go.Figure(
        go.Heatmap(
            z=percent, x=labels, y=labels, zmin=100 * low, zmax=100 * high, colorscale="Viridis",
            colorbar={"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
            hovertemplate="%{y}<br>%{x}<br>overlap %{z} %<extra></extra>",
        )
    )  # fmt: skip
    axis = {"type": "category", "showgrid": False, "tickfont": {"size": 10}, "ticks": ""}
    figure.update_layout(
        height=640,
        xaxis={**axis, "tickangle": -90},
        yaxis={**axis, "autorange": "reversed"},
        shapes=[_boundaries(view.steps.sentence[rows])],
        margin=MARGIN,
    )
    return Panel(captions.stability(view, supports), figure)


def _boundaries(sentence: np.ndarray) -> dict[str, object]:
    # lines cross the whole map; many lines only frame each sentence
    edges = [-0.5, *(np.flatnonzero(np.diff(sentence)) + 0.5).tolist(), len(sentence) - 0.5]
    path = ""
    for before, at, after in zip(edges, edges[1:], edges[2:], strict=False):
        begin, end = (edges[0], edges[-1]) if len(edges) <= MOST_LINES + 2 else (before, after)
        path += f"M{at},{begin}L{at},{end}M{begin},{at}L{end},{at}"
    return {"type": "path", "path": path or "M0,0", "line": {"color": "white", "width": 1}}


def lag(view: View) -> Panel:
    """Draw the overlap of pairs within a sentence and across a boundary, and the number of pairs."""
    figure = make_subplots(2, 1, shared_xaxes=True, row_heights=[0.78, 0.22], vertical_spacing=0.05)
    for line, color in zip(view.lags, (WITHIN, ACROSS), strict=True):
        same = {"legendgroup": line.name, "x": line.lag}
        edge = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        figure.add_scatter(y=line.low, **edge, **same, row=1, col=1)
        figure.add_scatter(y=line.high, fill="tonexty", fillcolor=faint(color), **edge, **same, row=1, col=1)
        figure.add_scatter(
            y=line.mean, mode="lines", name=f"{line.name}, mean {line.overall:.3f}",
            line={"color": color, "width": 2.5}, customdata=np.stack([line.low, line.high, line.pairs], 1),
            hovertemplate="%{y:.3f}, 10 to 90 %: %{customdata[0]:.3f} to %{customdata[1]:.3f}<extra></extra>",
            **same, row=1, col=1,
        )  # fmt: skip
        figure.add_scatter(
            y=line.pairs, mode="lines", name=line.name, line={"color": color, "width": 1.5}, showlegend=False,
            hovertemplate="%{y:,} pairs<extra></extra>", **same, row=2, col=1,
        )  # fmt: skip
    figure.update_yaxes(title_text="overlap", range=[0, 1], row=1, col=1)
    figure.update_yaxes(title_text="pairs", rangemode="tozero", nticks=3, row=2, col=1)
    figure.update_xaxes(title_text="steps apart", rangemode="tozero", row=2, col=1)
    figure.update_layout(height=360, hovermode="x", legend=LEGEND, margin=MARGIN)
    return Panel(captions.lag(view), figure)


def faint(color: str) -> str:
    """Make a color `#rrggbb` transparent, for a band."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.18)"
