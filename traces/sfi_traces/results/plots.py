"""Figures of results: scores of an evaluation, speeds of a benchmark."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from sfi_core.machine.memory import name
from sfi_traces.figures import new_figure, save
from sfi_traces.results import REFERENCE

# further methods reuse the colors with other markers
COLORS = (
    "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive",
    "tab:cyan", "goldenrod", "black", "navy", "deeppink",
)  # fmt: skip
MARKERS = "os^Dv<>PX*h"


def plot_evaluation(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw a panel for each task and length, with a line for each method; `kind` is "png" or "svg"."""
    rows = [row for row in document["rows"] if row["score"] is not None]
    panels = list(dict.fromkeys((row["task"], row["length"]) for row in rows))
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns) or 1
    figure = new_figure(5.2 * columns, 4.0 * lines + 1.2)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    methods = dict.fromkeys(row["method"] for row in rows if row["policy"] != REFERENCE)
    styles = {
        method: {"color": color, "marker": marker}
        for method, color, marker in zip(methods, cycle(COLORS), cycle(MARKERS), strict=False)
    }
    for axes, place in zip(grid.flat, panels, strict=False):
        _draw_scores(axes, [row for row in rows if (row["task"], row["length"]) == place], styles)
        axes.set_title(f"{place[0]}, {place[1]:,} tokens", fontsize=10)
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


def _draw_scores(axes: Any, rows: Sequence[dict[str, Any]], styles: dict[str, dict[str, Any]]) -> None:
    for row in rows:
        if row["policy"] == REFERENCE:
            axes.axhline(row["score"], color="0.35", linewidth=1.2, label=row["method"])
    for method, style in styles.items():
        line = sorted((row for row in rows if row["method"] == method), key=lambda row: row["read"])
        if line:
            below = [row["score"] - row["low"] for row in line]
            above = [row["high"] - row["score"] for row in line]
            axes.errorbar(
                [100 * row["read"] for row in line], [row["score"] for row in line], (below, above),
                label=method, markersize=5, linewidth=1.2, elinewidth=0.6, capsize=1.5, alpha=0.9, **style,
            )  # fmt: skip
    axes.set_ylim(-0.04, 1.04)
    axes.set_xlim(left=0)
    axes.set_xlabel("read for attention and selection, % of the context")
    axes.set_ylabel("score")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def plot_bench(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw tokens/s of a benchmark or a forecast with rows against context, a panel for each batch."""
    rows = document["rows"]
    batches = sorted({row["batch"] for row in rows})
    figure = new_figure(5.6 * len(batches), 4.4)
    colors = dict(zip(dict.fromkeys(row["policy"] for row in rows), cycle(COLORS), strict=False))
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        _draw_speeds(axes, [row for row in rows if row["batch"] == batch], colors)
        axes.set_title(f"batch {batch}", fontsize=10)
    figure.suptitle(
        f"{document['model']['name']}, {document['model']['dtype']}, {name(document['machine'])}: "
        "measured solid, what bytes allow dashed",
        fontsize=10,
    )
    save(figure, path, kind=kind)


def _draw_speeds(axes: Any, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
    contexts = sorted({row["context"] for row in rows})
    for policy in dict.fromkeys(row["policy"] for row in rows):
        line = sorted((r for r in rows if r["policy"] == policy), key=lambda row: row["context"])
        at, color = [row["context"] for row in line], colors[policy]
        measured = [row.get("decode_tokens_per_second") for row in line]
        if None not in measured:
            low, high = ([row[f"decode_tokens_per_second_{end}"] for row in line] for end in ("min", "max"))
            axes.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
            axes.plot(at, measured, "-o", color=color, label=policy)
        if not policy.startswith("transformers"):  # moves the same bytes as full-kv
            label = f"{policy}, bytes" if None in measured else None
            bound = [row["roofline_tokens_per_second"] for row in line]
            axes.plot(at, bound, "--", color=color, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context / 1024:g}K" for context in contexts])
    axes.minorticks_off()
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("decoded tokens/s, all requests")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
