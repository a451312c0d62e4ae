"""The study's figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.study.bootstrap import Estimate, estimates
from benchmarks.study.front import PLACES
from benchmarks.study.measured import KL, Measured, name_of, reads_column
from benchmarks.study.observed import Row, column, windows
from benchmarks.study.sentences import LAGS
from sfi_traces.figures import DPI, check_matplotlib, new_figure

SHADE = 0.15  # opacity of an interval
COLORS = 10  # of the cycle; one more is black
MARKS = "osv^D<>pP*Xhd"


def draw_front(data: Measured, methods: Sequence[tuple[str, str]], kinds: Sequence[str], path: Path) -> None:
    """Draw KL against the share of the context that was really read, a panel a kind, and one for all."""
    check_matplotlib("figures")
    panels = ["all", *kinds]
    figure = new_figure(4.2 * 3, 3.6 * -(-len(panels) // 3))
    grid = figure.subplots(-(-len(panels) // 3), 3, sharex=True, sharey=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        for number, (label, method) in enumerate(methods):
            _curve(axes, data, (label, method), () if panel == "all" else (panel,), number)
        axes.set(title=panel, xscale="log", yscale="log", xlabel="tokens read, choosing included, %")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("{x:g}")
        axes.grid(visible=True, which="both", alpha=0.2)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_ylabel("KL to full attention, nats")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=DPI)


def draw_stability(rows: Sequence[Row], mode: str, size: int, path: Path) -> None:
    """Draw overlaps by lag and by place in the sentence, and what an older support retains."""
    check_matplotlib("figures")
    some = [row for row in rows if row["mode"] == mode and row["size"] == size]
    figure = new_figure(15, 3.6)
    lag, place, old = figure.subplots(1, 3)
    chance = float(np.mean([row["chance"] for row in some]))
    for name, label in (("same", "in one sentence"), ("across", "across a boundary")):
        _band(lag, LAGS, estimates(windows(some, column("by_lag", name))), label)
    lag.set_xscale("log", base=2)
    lag.xaxis.set_major_formatter("{x:g}")
    lag.set(xlabel="steps apart", ylabel=f"overlap of the top {size}")
    consecutive = estimates(windows(some, column("consecutive")))
    _band(place, range(len(PLACES)), consecutive, "with the step before")
    place.set_xticks(range(len(PLACES)), PLACES)
    place.set(xlabel="steps since the token that ended a sentence", ylabel="overlap")
    for name in ("boundary", "next", "any"):
        ratios = estimates(windows(some, column("retained", name)))
        _band(old, range(len(PLACES)), ratios, {"any": "any step"}.get(name, f"{name} token"))
    old.set_xticks(range(len(PLACES)), PLACES)
    old.set(xlabel="age of the support, steps", ylabel="probability held, of the best support's")
    for axes in (lag, place):
        axes.axhline(chance, color="gray", linestyle=":", label="chance")
    for axes in (lag, place, old):
        axes.legend(fontsize=8)
        axes.grid(visible=True, alpha=0.2)
    figure.savefig(path, dpi=DPI)


def _curve(axes: Any, data: Measured, method: tuple[str, str], kinds: Sequence[str], number: int) -> None:
    points = []
    for share in data.shares(method[1]):
        values = data.by_kind((method[1], share), kinds=kinds)
        if values:
            columns = estimates(values)
            points.append((100 * columns[reads_column(method[1])].value, columns[KL]))
    if not points:
        return
    reads = [read for read, _ in points]
    value = np.array([kl.value for _, kl in points])
    ends = np.array([[kl.value - kl.low, kl.high - kl.value] for _, kl in points]).T
    axes.errorbar(
        reads, value, yerr=np.maximum(ends, 0), label=name_of(*method), marker=MARKS[number % len(MARKS)],
        color="black" if number == COLORS else f"C{number % COLORS}", markersize=4, linewidth=1,
        elinewidth=0.6,
    )  # fmt: skip


def _band(axes: Any, at: Sequence[float], curve: Sequence[Estimate], label: str) -> None:
    (line,) = axes.plot(at, [point.value for point in curve], marker="o", markersize=3, label=label)
    low, high = [point.low for point in curve], [point.high for point in curve]
    axes.fill_between(at, low, high, alpha=SHADE, color=line.get_color())
