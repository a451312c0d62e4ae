"""An evaluation as a figure of the score against the share of the cache that was read."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfi_traces.figures.style import new_figure, save
from sfi_traces.results.evaluation.summary import REFERENCE

PANEL = (5.2, 4.0)  # inches
COLUMNS = 3  # panels of a row, at most
# further methods reuse the colors with other markers
COLORS = (
    "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive",
    "tab:cyan", "goldenrod", "black", "navy", "deeppink",
)  # fmt: skip
MARKERS = "os^Dv<>PX*h"


def write_plot(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw a panel for each task and length, with a line for each method; `kind` is "png" or "svg"."""
    rows = [row for row in document["rows"] if row["score"] is not None]
    panels = list(dict.fromkeys((row["task"], row["length"]) for row in rows))
    columns = min(COLUMNS, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    figure = new_figure(PANEL[0] * columns, PANEL[1] * lines + 1.2)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    styles = _styles(rows)
    for axes, place in zip(grid.flat, panels, strict=False):
        own = [row for row in rows if (row["task"], row["length"]) == place]
        _draw(axes, own, styles)
        length = "" if place[1] is None else f", {place[1]:,} tokens"
        axes.set_title(f"{place[0]}{length}", fontsize=10)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    handles = {
        text: handle for axes in grid.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=1 + 2 * columns, fontsize=8,
            frameon=False,
        )  # fmt: skip
    counts = sorted({row["n"] for row in rows}) or [0]
    samples = f"{counts[-1]} samples" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} samples"
    figure.suptitle(f"{document['model']['name']}: score with its 95 % interval, {samples} a point", fontsize=11)
    save(figure, path, kind=kind)


def _styles(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    methods = dict.fromkeys(row["method"] for row in rows if row["policy"] != REFERENCE)
    return {
        method: {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        for index, method in enumerate(methods)
    }


def _draw(axes: Any, rows: Sequence[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    for row in rows:
        if row["policy"] == REFERENCE:
            axes.axhline(row["score"], color="0.35", linewidth=1.2, label=row["method"])
    for method, style in styles.items():
        own = sorted((row for row in rows if row["method"] == method), key=lambda row: row["read"])
        if own:
            below = [row["score"] - row["low"] for row in own]
            above = [row["high"] - row["score"] for row in own]
            axes.errorbar(
                [100 * row["read"] for row in own], [row["score"] for row in own], (below, above),
                label=method, markersize=5, linewidth=1.2, elinewidth=0.6, capsize=1.5, alpha=0.9, **style,
            )  # fmt: skip
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(left=0)
    axes.set_xlabel("read for attention and selection, % of the context")
    axes.set_ylabel("score")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
