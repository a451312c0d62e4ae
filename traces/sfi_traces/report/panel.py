"""A figure of the report with its words, and the map of layers x KV heads that several figures have."""

import json
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from sfi_traces.views.captions import Caption
from sfi_traces.views.figure_data import HeadMap

MARGIN = {"l": 8, "r": 8, "t": 12, "b": 8}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
MOST_NUMBERS = 8  # columns of a map with their number written in


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure with its caption.

    The page sets its colors of text, paper and grid; `more` are further plain values for the page's script.
    """

    caption: Caption
    figure: go.Figure
    more: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return what the page's script and section need."""
        plot = json.loads(self.figure.to_json())  # arrays as base64, which Plotly reads
        plot["layout"].pop("template", None)
        return {"caption": self.caption, **plot, **self.more}


def cells(found: HeadMap, low: float, high: float, word: str) -> go.Heatmap:
    """Draw a column for each layer, a row for each KV head; `word` names the number in the hover text."""
    return go.Heatmap(
        z=found.value.T, x=[f"layer {layer}" for layer in found.layers],
        y=[f"head {head}" for head in found.heads],
        colorscale="Viridis", xgap=1, ygap=1, zmin=low, zmax=high, hoverongaps=False,
        colorbar={"thickness": 12, "outlinewidth": 0, "tickformat": ".2f"},
        texttemplate="%{z:.3f}" if len(found.layers) <= MOST_NUMBERS else None,
        hovertemplate=f"%{{x}}, KV %{{y}}<br>{word} %{{z:.4f}}<extra></extra>",
    )  # fmt: skip


def axes(heads: list[int]) -> dict[str, Any]:
    """Return the layout of a figure whose first axes have the map."""
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    return {
        "height": min(600, max(240, 110 + 24 * len(heads))),
        "xaxis": axis,
        "yaxis": {**axis, "autorange": "reversed"},
    }
