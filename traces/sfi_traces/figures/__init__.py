"""Figures of a trace, drawn by matplotlib: one file for each kind, `draw(view)` makes it."""

from importlib import import_module
from typing import Any

from sfi_traces.views.view import View

KINDS = {  # kind: module
    "heatmap": "heatmap",
    "lag": "lag",
    "lambda": "lambda_star",
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
