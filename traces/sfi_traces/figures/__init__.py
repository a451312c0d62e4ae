"""Figures of a trace by matplotlib, one module for each kind."""

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
    """Draw a figure as a `matplotlib.figure.Figure`.

    Raises:
        TraceError: The trace lacks the figure's data; names the option that records it.
    """
    return import_module(f"sfi_traces.figures.{KINDS[kind]}").draw(view)
