"""The style of all figures; matplotlib is an extra, imported with the first figure."""

import textwrap
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfi_core.errors import ConfigError, not_installed
from sfi_traces.model.request import Request
from sfi_traces.views.captions import Caption, subject
from sfi_traces.views.labels import SLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")
DPI = 150
MUTED = "#5b6570"
CHARACTERS_PER_INCH = 16  # of a note
MARGIN, TITLE, LINE = 0.12, 0.27, 0.165  # inches


def check_matplotlib(what: str) -> None:
    """Raise `BackendError` if matplotlib is not installed; `what`, such as "plots", is in the message."""
    if find_spec("matplotlib") is None:
        raise not_installed(f"{what} need", "matplotlib", "plots")


def check_plot(path: Path) -> None:
    """Raise `ConfigError` unless a path ends in .png or .svg, `BackendError` without matplotlib."""
    suffixes = tuple(f".{form}" for form in FORMATS)
    if path.suffix not in suffixes:
        raise ConfigError(f"plot must end in one of {suffixes}, got {path.name}")
    check_matplotlib("plots")


def new_figure(width: float, height: float) -> "Figure":
    """Make an empty figure; sizes are in inches."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    return Figure(figsize=(width, height), layout="constrained")


def title(figure: "Figure", caption: Caption, request: Request) -> None:
    """Write the caption and the run's name above a figure."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415 - an extra

    width, height = figure.get_size_inches()
    lines = [subject(request), *textwrap.wrap(caption.note, int(width * CHARACTERS_PER_INCH))]
    left = MARGIN / width
    figure.text(left, 1 - MARGIN / height, caption.title, fontsize=12, fontweight="bold", va="top")
    figure.text(
        left, 1 - (MARGIN + TITLE) / height, "\n".join(lines), fontsize=8.5, color=MUTED, va="top",
        linespacing=1.35, parse_math=False,
    )  # fmt: skip
    free = 1 - (2 * MARGIN + TITLE + LINE * len(lines)) / height
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, free)))


def mark_slow(axes: "Axes", at: np.ndarray) -> None:
    """Mark slow steps with triangles below the axis."""
    axes.tick_params(axis="x", pad=7)
    axes.plot(
        at, np.full(len(at), -0.012), "^", color=SLOW, markersize=3.5, markeredgewidth=0,
        transform=axes.get_xaxis_transform(), clip_on=False, label="slow step",
    )  # fmt: skip


def colorbar(figure: "Figure", image: Any, axes: Any, **options: Any) -> Any:
    """Add a color bar without a frame."""
    bar = figure.colorbar(image, ax=axes, **options)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    return bar


def plain(axes: "Axes") -> None:
    """Remove the frame at the top and right, and add a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Any, path: Path, *, kind: str) -> None:
    """Write a figure as "png" or "svg", whatever the path ends in."""
    with warnings.catch_warnings():  # characters that no font has are drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, format=kind, dpi=DPI)
