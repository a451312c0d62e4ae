"""What a drawer of the report hands over."""

import json
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from sfi_traces.views.captions import Caption

MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


def span(first: int, last: int) -> str:
    """Name a bin of whole numbers: "1", "3-4"."""
    return f"{first}" if first == last else f"{first}-{last}"


@dataclass(frozen=True, slots=True)
class Panel:
    """A figure with its words.

    Attributes:
        caption: Title and note.
        figure: Without colors of text, paper and grid: the page sets them, light or dark.
        more: Further plain values for the page's script.
    """

    caption: Caption
    figure: go.Figure
    more: dict[str, Any] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Return all that the page's script and its section need."""
        plot = json.loads(self.figure.to_json())  # arrays as base64, which Plotly reads
        plot["layout"].pop("template", None)
        return {"caption": self.caption, **plot, **self.more}
