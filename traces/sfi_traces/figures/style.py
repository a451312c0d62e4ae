"""What the figures have in common."""

import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sfi_traces.captions import Caption, subject
from sfi_traces.labels import SLOW
from sfi_traces.view import View

MUTED = "#5b6570"


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure, its size in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def title(figure: Figure, caption: Caption, view: View) -> None:
    """Say what a figure shows, and of which run."""
    figure.suptitle(caption.title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    room = int(figure.get_figwidth() * 14)  # characters of a line
    lines = [subject(view), *textwrap.wrap(caption.note, room)]
    figure.axes[0].set_title(
        "\n".join(lines), fontsize=8.5, color=MUTED, loc="left", parse_math=False, linespacing=1.4
    )


def mark_slow(axes: Axes, at: np.ndarray) -> None:
    """Put a tick below an axis for each slow step; nothing where all steps are slow."""
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
