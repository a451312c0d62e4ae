"""What the figures have in common."""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from sfi_traces.views.captions import Caption, subject
from sfi_traces.views.labels import SLOW
from sfi_traces.views.view import View

MUTED = "#5b6570"
CHARACTERS_PER_INCH = 16  # of a note
MARGIN, TITLE, LINE = 0.12, 0.27, 0.165  # inches


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, its size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def title(figure: Figure, caption: Caption, view: View) -> None:
    """Say above a figure what it shows, and of which run."""
    width, height = figure.get_size_inches()
    lines = [subject(view), *textwrap.wrap(caption.note, int(width * CHARACTERS_PER_INCH))]
    left = MARGIN / width
    figure.text(left, 1 - MARGIN / height, caption.title, fontsize=12, fontweight="bold", va="top")
    figure.text(
        left, 1 - (MARGIN + TITLE) / height, "\n".join(lines), fontsize=8.5, color=MUTED, va="top",
        linespacing=1.35, parse_math=False,
    )  # fmt: skip
    free = 1 - (2 * MARGIN + TITLE + LINE * len(lines)) / height
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=(0, 0, 1, free)))


def mark_slow(axes: Axes, at: np.ndarray) -> None:
    """Put a tick below an axis for each slow step; nothing where all steps are slow."""
    axes.tick_params(axis="x", pad=7)
    axes.plot(
        at, np.full(len(at), -0.012), "^", color=SLOW, markersize=3.5, markeredgewidth=0,
        transform=axes.get_xaxis_transform(), clip_on=False, label="slow step",
    )  # fmt: skip


def plain(axes: Axes) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


@contextmanager
def quiet_glyphs() -> Iterator[None]:
    """Draw a box, without a word, for a token's character that no font has."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
