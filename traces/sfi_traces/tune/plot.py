"""A tuning as a figure: all trials, the front, and measured settings."""

from pathlib import Path
from typing import Any

from sfi_traces.figures.style import MUTED, new_figure, plain, save
from sfi_traces.tune.objective import OBJECTIVES

ALL, FRONT, CHOSEN, MEASURED, WRONG, OTHER = "#9aa5b1", "tab:blue", "tab:red", "tab:orange", "tab:red", "tab:purple"
COSTS = {"bytes": ("MB read for a token, byte model", 1e-6), "slow-rate": ("slow rate", 1.0)}
KEPT = {"retained": "retained mass of fast steps, mean", "retained-p5": "the same, 5th percentile"}
FIELDS = {name: one.field for name, one in OBJECTIVES.items()}


def write_plot(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw retained mass against cost, one panel for each pair of objectives, as "png" or "svg".

    The document, a tuning's, has at least one setting on the front.
    """
    names = [one["name"] for one in document["objectives"]]
    rows = [name for name in names if name in KEPT]
    columns = [name for name in names if name in COSTS]
    figure = new_figure(1.5 + 6.0 * len(columns), 0.8 + 4.2 * len(rows))
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for axes_of_row, kept in zip(grid, rows, strict=True):
        for axes, cost in zip(axes_of_row, columns, strict=True):
            _draw(axes, document, cost, kept)
            plain(axes)
            axes.set_xlabel(COSTS[cost][0])
            axes.set_ylabel(KEPT[kept])
    grid[0][0].legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{document['model']}: {document['trials']:,} trials on {document['steps']:,} recorded steps",
        fontsize=10, color=MUTED,
    )  # fmt: skip
    save(figure, path, kind=kind)


def _draw(axes: Any, document: dict[str, Any], cost: str, kept: str) -> None:
    names = [one["name"] for one in document["objectives"]]
    scale = COSTS[cost][1]
    points = [(values[names.index(cost)] * scale, values[names.index(kept)]) for values in document["points"]]
    axes.scatter(*zip(*points, strict=True), s=9, color=ALL, alpha=0.5, linewidths=0, label="trials")
    front = [_place(row, cost, kept) for row in document["front"]]
    axes.plot(*zip(*front, strict=True), "o-", color=FRONT, markersize=4, linewidth=0.9, label="Pareto front")
    recorded = _place(document["recorded"], cost, kept)
    axes.scatter(*recorded, s=70, marker="*", color="black", label="the trace's own setting", zorder=3)
    for row in document["front"]:
        if row["chosen"]:
            axes.scatter(
                *_place(row, cost, kept), s=110, facecolors="none", edgecolors=CHOSEN, linewidths=1.6,
                label="chosen", zorder=4,
            )  # fmt: skip
    _draw_runs(axes, document, cost, kept)


def _draw_runs(axes: Any, document: dict[str, Any], cost: str, kept: str) -> None:
    # a run whose tokens soon differ is comparable on a few steps only, and is drawn where it was predicted
    scale = COSTS[cost][1]
    measured, wrong, others = [], [], []
    for one in document["confirmed"]:
        predicted = _place(document["front"][one["place"]], cost, kept)
        if one["exact_match"] is False:
            wrong.append(predicted)
        elif one["steps"] < one["recorded_steps"]:
            others.append(predicted)
        else:
            measured.append((one["measured"][FIELDS[cost]] * scale, one["measured"][FIELDS[kept]]))
    for places, marker, color, label in (
        (measured, "x", MEASURED, "measured"),
        (wrong, "X", WRONG, "WRONG answer when it ran"),
        (others, "P", OTHER, "other tokens when it ran"),
    ):
        if places:
            axes.scatter(*zip(*places, strict=True), s=60, marker=marker, color=color, label=label, zorder=5)


def _place(row: dict[str, Any], cost: str, kept: str) -> tuple[float, float]:
    return row[FIELDS[cost]] * COSTS[cost][1], row[FIELDS[kept]]
