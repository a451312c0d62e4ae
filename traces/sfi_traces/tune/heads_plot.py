"""Similarity of KV heads as heat maps, one for each layer (SyncKV, Figure 2c, within layers)."""

from pathlib import Path
from typing import Any

import numpy as np

from sfi_traces.figures.style import MUTED, colorbar, new_figure, save

COLUMNS, SIZE = 6, 2.1  # maps side by side; inches of a map


def write_plot(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw the similarity of every two KV heads of each layer, sorted by cluster, as "png" or "svg".

    White lines separate clusters; a star marks representatives.
    """
    layers = document["layers"]
    columns = min(COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure = new_figure(1.2 + SIZE * columns, 0.8 + SIZE * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    low = min(float(np.min(one["similarity"])) for one in layers)
    for axes, one in zip(grid, layers, strict=False):
        image = _draw(axes, one, min(low, 0.99))
    for axes in grid[len(layers) :]:
        axes.set_axis_off()
    bar = colorbar(figure, image, grid.tolist(), shrink=0.7, pad=0.015)
    bar.set_label("overlap coefficient", fontsize=9)
    figure.suptitle(
        f"{document['model']}: top {document['top_k']:,} of KV heads, {document['steps']:,} steps",
        fontsize=10, color=MUTED,
    )  # fmt: skip
    save(figure, path, kind=kind)


def _draw(axes: Any, one: dict[str, Any], low: float) -> Any:
    label_H = np.array(one["cluster_of"])
    order = np.argsort(label_H, kind="stable")
    similarity_HH = np.array(one["similarity"])[np.ix_(order, order)]
    image = axes.imshow(similarity_HH, cmap="viridis", vmin=low, vmax=1, interpolation="nearest")
    edges = np.flatnonzero(np.diff(label_H[order])) + 0.5
    for lines in (axes.vlines, axes.hlines):
        lines(edges, -0.5, len(order) - 0.5, color="white", linewidth=1.2)
    names = [f"{head}*" if head in one["representatives"] else str(head) for head in order]
    axes.set_xticks(range(len(order)), names, fontsize=7)
    axes.set_yticks(range(len(order)), names, fontsize=7)
    axes.tick_params(length=2, pad=1.5)
    axes.spines[:].set_visible(False)
    axes.set_title(f"layer {one['layer']}", fontsize=9)
    return image
