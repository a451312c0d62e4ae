"""Figures of a trace, drawn by matplotlib: one file for each kind, `draw(view)` makes it."""

from importlib import import_module
from typing import Any

from sfi_traces.views.view import View

KINDS = {  # kind: module
    "heatmap": "heatmap",
    "raster": "raster",
    "lag": "lag",
    "lambda": "lambda_star",
    "drift": "drift",
    "head-similarity": "head_similarity",
    "query-cosine": "query_cosine",
    "corrections": "corrections",
    "acceptance": "acceptance",
    "retained": "retained",
    "timeline": "timeline",
}


def draw(kind: str, view: View) -> Any:
    """Draw a figure.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        TraceError: The trace lacks what the figure shows; names the option that records it.
    """
    return import_module(f"sfi_traces.figures.{KINDS[kind]}").draw(view)
