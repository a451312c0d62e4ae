"""Figures of tuning: trials, the front and measured settings; the similarity of KV heads (SyncKV, Figure 2c)."""

from pathlib import Path
from typing import Any

import numpy as np

from sfi_traces.figures import MUTED, colorbar, new_figure, plain, save
from sfi_traces.tune.tuning import OBJECTIVES

ALL, FRONT, CHOSEN, MEASURED, WRONG, OTHER = "#9aa5b1", "tab:blue", "tab:red", "tab:orange", "tab:red", "tab:purple"
COSTS = {"bytes": ("MB read for a token, byte model", 1e-6), "slow-rate": ("slow rate", 1.0)}
RETAINED = {"retained": "retained mass of fast steps, mean", "retained-p5": "the same, 5th percentile"}
FIELDS = {name: objective.field for name, objective in OBJECTIVES.items()}
HEAD_COLUMNS, HEAD_INCHES = 6, 2.1  # maps of heads side by side; inches of a map


def plot_tuning(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw retained mass against cost, one panel for each pair of objectives, as "png" or "svg".

    The document, a tuning's, has at least one setting on the front.
    """
    names = [objective["name"] for objective in document["objectives"]]
    rows = [name for name in names if name in RETAINED]
    columns = [name for name in names if name in COSTS]
    figure = new_figure(1.5 + 6.0 * len(columns), 0.8 + 4.2 * len(rows))
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes_of_row, mass in zip(grid, rows, strict=True):
        for axes, cost in zip(axes_of_row, columns, strict=True):
            _draw(axes, document, cost, mass)
            plain(axes)
            axes.set_xlabel(COSTS[cost][0])
            axes.set_ylabel(RETAINED[mass])
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{document['model']}: {document['trials']:,} trials on {document['steps']:,} recorded steps",
        fontsize=10, color=MUTED,
    )  # fmt: skip
    save(figure, path, kind=kind)


def _draw(axes: Any, document: dict[str, Any], cost: str, mass: str) -> None:
    names = [objective["name"] for objective in document["objectives"]]
    scale = COSTS[cost][1]
    points = [(values[names.index(cost)] * scale, values[names.index(mass)]) for values in document["points"]]
    axes.scatter(*zip(*points, strict=True), s=9, color=ALL, alpha=0.5, linewidths=0, label="trials")
    front = [_place(row, cost, mass) for row in document["front"]]
    axes.plot(*zip(*front, strict=True), "o-", color=FRONT, markersize=4, linewidth=0.9, label="Pareto front")
    recorded = _place(document["recorded"], cost, mass)
    axes.scatter(*recorded, s=70, marker="*", color="black", label="the trace's own setting", zorder=3)
    for row in document["front"]:
        if row["chosen"]:
            axes.scatter(
                *_place(row, cost, mass), s=110, facecolors="none", edgecolors=CHOSEN, linewidths=1.6,
                label="chosen", zorder=4,
            )  # fmt: skip
    _draw_runs(axes, document, cost, mass)


def _draw_runs(axes: Any, document: dict[str, Any], cost: str, mass: str) -> None:
    # a run whose tokens soon differ is comparable on a few steps only, and is drawn where it was predicted
    scale = COSTS[cost][1]
    measured, wrong, others = [], [], []
    for run in document["confirmed"]:
        predicted = _place(document["front"][run["place"]], cost, mass)
        if run["exact_match"] is False:
            wrong.append(predicted)
        elif run["steps"] < run["recorded_steps"]:
            others.append(predicted)
        else:
            measured.append((run["measured"][FIELDS[cost]] * scale, run["measured"][FIELDS[mass]]))
    for places, marker, color, label in (
        (measured, "x", MEASURED, "measured"),
        (wrong, "X", WRONG, "WRONG answer when it ran"),
        (others, "P", OTHER, "other tokens when it ran"),
    ):
        if places:
            axes.scatter(*zip(*places, strict=True), s=60, marker=marker, color=color, label=label, zorder=5)


def _place(row: dict[str, Any], cost: str, mass: str) -> tuple[float, float]:
    return row[FIELDS[cost]] * COSTS[cost][1], row[FIELDS[mass]]


def plot_heads(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw the similarity of every two KV heads of each layer, sorted by cluster, as "png" or "svg".

    White lines separate clusters; a star marks representatives.
    """
    layers = document["layers"]
    columns = min(HEAD_COLUMNS, len(layers))
    rows = -(-len(layers) // columns)
    figure = new_figure(1.2 + HEAD_INCHES * columns, 0.8 + HEAD_INCHES * rows)
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    low = min(float(np.min(layer["similarity"])) for layer in layers)
    for axes, layer in zip(grid, layers, strict=False):
        image = _draw_heads(axes, layer, min(low, 0.99))
    for axes in grid[len(layers) :]:
        axes.set_axis_off()
    bar = colorbar(figure, image, grid.tolist(), shrink=0.7, pad=0.015)
    bar.set_label("overlap coefficient", fontsize=9)
    figure.suptitle(
        f"{document['model']}: top {document['top_k']:,} of KV heads, {document['steps']:,} steps",
        fontsize=10, color=MUTED,
    )  # fmt: skip
    save(figure, path, kind=kind)


def _draw_heads(axes: Any, layer: dict[str, Any], low: float) -> Any:
    label_H = np.array(layer["cluster_of"])
    order = np.argsort(label_H, kind="stable")
    similarity_HH = np.array(layer["similarity"])[np.ix_(order, order)]
    image = axes.imshow(similarity_HH, cmap="viridis", vmin=low, vmax=1, interpolation="nearest")
    edges = np.flatnonzero(np.diff(label_H[order])) + 0.5
    for lines in (axes.vlines, axes.hlines):
        lines(edges, -0.5, len(order) - 0.5, color="white", linewidth=1.2)
    names = [f"{head}*" if head in layer["representatives"] else str(head) for head in order]
    axes.set_xticks(range(len(order)), names, fontsize=7)
    axes.set_yticks(range(len(order)), names, fontsize=7)
    axes.tick_params(length=2, pad=1.5)
    axes.spines[:].set_visible(False)
    axes.set_title(f"layer {layer['layer']}", fontsize=9)
    return image
