"""A heat map of layers x KV heads, which several figures have."""

from typing import TYPE_CHECKING

import numpy as np

from sfi_traces.figures.style import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NUMBERS = 400  # cells with their number written in


def sized_figure(rows: int, columns: int, *, beside: float = 0.0) -> "Figure":
    """Make a figure for so many cells, and so many inches of something else beside them."""
    width, height = 2.6 + 0.62 * columns, 1.9 + 0.34 * rows
    return new_figure(min(14, max(6.5, width) + beside), min(14, max(3.6, height)))


def draw_cells(axes: "Axes", value: np.ndarray, low: float, high: float, digits: int = 3) -> None:
    """Draw a cell for each number of a matrix, with the number where there are few, and a color bar."""
    image = axes.imshow(value, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    if value.size <= MOST_NUMBERS:
        for (row, column), one in np.ndenumerate(value):
            shade = "black" if one > (low + high) / 2 else "white"
            text = "" if np.isnan(one) else f"{one:.{digits}f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=7.5, color=shade)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    bar = axes.figure.colorbar(image, ax=axes, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)


def label_heads(axes: "Axes", layers: list[int], heads: list[int]) -> None:
    """Name the rows and columns."""
    axes.set_xticks(range(len(heads)), map(str, heads))
    axes.set_yticks(range(len(layers)), map(str, layers))
    axes.set_xlabel("KV head")
    axes.set_ylabel("layer")
