"""Replayed settings as a figure of what they retain against what they cost."""

from pathlib import Path
from typing import Any

from sfi_traces.figures.style import new_figure, save

INCHES = (11.0, 4.8)
COLORS = {
    "boundary": "tab:blue",
    "t-max": "tab:orange",
    "stride": "tab:green",
    "random": "tab:gray",
    "never": "tab:red",
    "always": "black",
    "codescan": "tab:purple",
}


def write_plot(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw retained mass against slow rate and against the estimated speed-up, as "png" or "svg"."""
    figure = new_figure(*INCHES)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, column in ((left, "slow_rate"), (right, "speedup")):
        _draw(axes, document["rows"], column)
        axes.grid(alpha=0.3)
    left.set_ylabel("retained mass of fast steps, mean")
    left.set_xlabel("slow rate")
    left.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_xlabel(f"estimated speed-up over full attention, batch {document['batch']}")
    right.xaxis.set_major_formatter("{x:g}x")
    right.legend(fontsize=8)
    figure.suptitle(
        f"{document['model']}: {len(document['requests'])} request(s), "
        f"{document['heads']} layer x head pairs; bars to the upper bound",
        fontsize=10,
    )
    save(figure, path, kind=kind)


def _draw(axes: Any, rows: list[dict[str, Any]], column: str) -> None:
    for policy, color in COLORS.items():
        own = [row for row in rows if row["policy"] == policy]
        if own:
            at, kept = [row[column] for row in own], [row["retained_mass"] for row in own]
            most = [row["retained_mass_upper"] for row in own]
            axes.vlines(at, kept, most, color=color, alpha=0.35, linewidth=1)
            axes.scatter(at, kept, s=18, color=color, label=policy)
    front = sorted((row[column], row["retained_mass"]) for row in rows if row["pareto"])
    axes.plot(*zip(*front, strict=True), color="black", linewidth=0.8, label="Pareto front")
    recorded = [(row[column], row["retained_mass"]) for row in rows if row["recorded"]]
    if recorded:
        axes.scatter(
            *zip(*recorded, strict=True), s=130, marker="*", facecolors="none", edgecolors="black",
            label="the trace's own setting",
        )  # fmt: skip
