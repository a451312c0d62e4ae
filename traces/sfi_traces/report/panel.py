"""A figure of the report with its words."""

import json
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from sfi_traces.views.captions import Caption

MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


def span(first: int, last: int) -> str:
    """Name a bin of integers: "1", "3-4"."""
    return f"{first}" if first == last else f"{first}-{last}"


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure with its caption.

    Attributes:
        figure: Without colors of text, paper and grid, which the page sets for light or dark.
        more: Further plain values for the page's script.
    """

    caption: Caption
    figure: go.Figure
    more: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return what the page's script and section need."""
        plot = json.loads(self.figure.to_json())  # arrays as base64, which Plotly reads
        plot["layout"].pop("template", None)
        return {"caption": self.caption, **plot, **self.more}
