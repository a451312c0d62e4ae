"""The report's heat map of layers x KV heads, used by several panels."""

from typing import Any

import numpy as np
import plotly.graph_objects as go

MOST_NUMBERS = 64  # cells with their number written in


def cells(
    value: np.ndarray, layers: list[int], heads: list[int], low: float, high: float, word: str
) -> go.Heatmap:
    """Draw a cell for each layer and KV head; `word` names the number in the hover text."""
    return go.Heatmap(
        z=value, x=[f"head {head}" for head in heads], y=[f"layer {layer}" for layer in layers],
        colorscale="Viridis", xgap=1, ygap=1, zmin=low, zmax=high, hoverongaps=False,
        colorbar={"thickness": 12, "outlinewidth": 0, "tickformat": ".2f"},
        texttemplate="%{z:.3f}" if value.size <= MOST_NUMBERS else None,
        hovertemplate=f"%{{y}}, KV %{{x}}<br>{word} %{{z:.4f}}<extra></extra>",
    )  # fmt: skip


def axes(layers: list[int]) -> dict[str, Any]:
    """Return the layout of a figure whose first axes have the map."""
    axis = {"type": "category", "showgrid": False, "ticks": ""}
    return {
        "height": min(900, max(200, 90 + 24 * len(layers))),
        "xaxis": axis,
        "yaxis": {**axis, "autorange": "reversed"},
    }
