"""What a drawer of the report hands over."""

from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from sfi_traces.views.captions import Caption

MARGIN = {"l": 8, "r": 8, "t": 8, "b": 8}
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"}


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
