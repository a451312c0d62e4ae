"""The figure of a tuning: trials, the front and measured settings."""

from pathlib import Path
from typing import Any

from sfi_traces.figures import MUTED, new_figure, plain, save

ALL, FRONT, CHOSEN, MEASURED, WRONG, OTHER = "#9aa5b1", "tab:blue", "tab:red", "tab:orange", "tab:red", "tab:purple"


def plot_tuning(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw retained mass against the bytes of a token, as "png" or "svg".

    The document, a tuning's, has at least one setting on the front.
    """
    figure = new_figure(7.5, 5.0)
    axes: Any = figure.subplots()
    points = [(bytes_ / 1e6, mass) for bytes_, mass in document["points"]]
    axes.scatter(*zip(*points, strict=True), s=9, color=ALL, alpha=0.5, linewidths=0, label="trials")
    front = list(map(_place, document["front"]))
    axes.plot(*zip(*front, strict=True), "o-", color=FRONT, markersize=4, linewidth=0.9, label="Pareto front")
    axes.scatter(
        *_place(document["recorded"]), s=70, marker="*", color="black", label="the trace's own setting", zorder=3
    )
    (chosen,) = (_place(row) for row in document["front"] if row["chosen"])
    axes.scatter(*chosen, s=110, facecolors="none", edgecolors=CHOSEN, linewidths=1.6, label="chosen", zorder=4)
    _draw_runs(axes, document)
    plain(axes)
    axes.set_xlabel("MB read for a token, byte model")
    axes.set_ylabel("retained mass of fast steps, mean")
    axes.legend(frameon=False, fontsize=8)
    figure.suptitle(
        f"{document['model']}: {document['trials']:,} trials on {document['steps']:,} recorded steps",
        fontsize=10, color=MUTED,
    )  # fmt: skip
    save(figure, path, kind=kind)


def _draw_runs(axes: Any, document: dict[str, Any]) -> None:
    # a run whose tokens soon differ is comparable on a few steps only, and is drawn where it was predicted
    measured, wrong, others = [], [], []
    for run in document["confirmed"]:
        predicted = _place(document["front"][run["place"]])
        if run["exact_match"] is False:
            wrong.append(predicted)
        elif run["steps"] < run["recorded_steps"]:
            others.append(predicted)
        else:
            measured.append(_place(run["measured"]))
    for places, marker, color, label in (
        (measured, "x", MEASURED, "measured"),
        (wrong, "X", WRONG, "WRONG answer when it ran"),
        (others, "P", OTHER, "other tokens when it ran"),
    ):
        if places:
            axes.scatter(*zip(*places, strict=True), s=60, marker=marker, color=color, label=label, zorder=5)


def _place(row: dict[str, Any]) -> tuple[float, float]:
    return row["bytes_per_token"] / 1e6, row["retained_mass"]
