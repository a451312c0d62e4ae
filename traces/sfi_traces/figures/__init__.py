"""Figures of a trace, drawn by matplotlib: one file for each kind, `draw(view)` makes it."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sfi_core.errors import BackendError
from sfi_traces.views.view import View

KINDS = {  # kind: module
    "heatmap": "heatmap",
    "raster": "raster",
    "lag": "lag",
    "lambda": "lambda_star",
    "retained": "retained",
    "timeline": "timeline",
}
FORMATS = ("png", "svg")
DPI = 150


def check_figures() -> None:
    """Refuse where figures cannot be drawn.

    Raises:
        BackendError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise BackendError(
            "figures need matplotlib, which is not installed; pip install 'sfi-toolkit[plots]'"
        )


def draw(kind: str, view: View) -> Any:
    """Draw a figure.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        TraceError: The trace lacks what the figure shows; names the option that records it.
    """
    return import_module(f"sfi_traces.figures.{KINDS[kind]}").draw(view)


def save(figure: Any, path: Path, form: str) -> None:
    """Write a figure as "png" or "svg", whatever the path ends in."""
    from sfi_traces.figures.style import quiet_glyphs  # noqa: PLC0415 - matplotlib is an extra

    with quiet_glyphs():
        figure.savefig(path, format=form, dpi=DPI)
