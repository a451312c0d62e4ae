"""Support raster: which positions each step's support holds."""

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sfi_traces.figures.style import mark_slow, new_figure, title
from sfi_traces.views import captions
from sfi_traces.views.labels import RASTER, SEGMENT, SLOW, number_ticks
from sfi_traces.views.raster import choose_place, meaning, rasters
from sfi_traces.views.view import View

MOST_STEPS, MOST_CELLS = 1200, 800
MOST_LABELS = 15


def draw(view: View) -> Figure:
    """Draw steps to the right and positions upward."""
    place, why = choose_place(view)
    raster = rasters(view, [place], most_steps=MOST_STEPS, most_cells=MOST_CELLS)[0]
    figure = new_figure(11, 6.4)
    axes = figure.subplots()
    high, count = raster.cells.shape
    axes.imshow(
        raster.cells, origin="lower", aspect="auto", interpolation="nearest", vmin=0, vmax=len(RASTER),
        cmap=ListedColormap(["white", *RASTER.values()]),
        extent=(-0.5, count - 0.5, -0.5, high * raster.per_cell - 0.5),
    )  # fmt: skip
    entry = np.arange(count)
    marks: list[Artist] = [
        Patch(color=RASTER[kind], label=text) for kind, text in meaning(raster).items()
    ]
    if raster.recent is not None:
        axes.step(entry, raster.recent, where="mid", color=SEGMENT, linewidth=1)
        axes.axhline(raster.sink - 0.5, color=SEGMENT, linewidth=1)
        marks.append(
            Line2D([], [], color=SEGMENT, label="where the sink ends and the recent tokens begin")
        )
    axes.step(entry, raster.context, where="mid", color="black", linewidth=0.8)
    if not raster.slow.all():
        mark_slow(axes, entry[raster.slow])
        marks.append(Line2D([], [], linestyle="", marker="^", color=SLOW, label="slow step"))
    axes.set_xticks(*number_ticks(raster.step, MOST_LABELS))
    axes.set_xlabel("decoding step")
    axes.set_ylabel("position in the context")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=marks, loc="outside lower left", ncols=len(marks), fontsize=8, frameon=False
    )
    title(figure, captions.raster(view, raster, why), view)
    return figure
