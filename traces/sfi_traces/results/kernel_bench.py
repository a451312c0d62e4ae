"""The kernel benchmark's document as a Parquet table and as a figure."""

import json
from pathlib import Path
from typing import Any

from sfi_core.machine.describe import name
from sfi_core.measure.kernel_bench.settings import TABLE_1
from sfi_traces.figures.style import new_figure, save
from sfi_traces.results.parquet import write_rows

SCHEMA_VERSION = 1
INCHES = (11.0, 4.6)
LINES = (  # column, label, color, marker
    ("speedup_over_dense", "over our dense", "tab:blue", "o"),
    ("speedup_over_sdpa", "over PyTorch SDPA", "tab:orange", "s"),
    ("speedup_over_paper_like", "over paper-like dense", "tab:green", "^"),
)


def write_parquet(document: dict[str, Any], path: Path) -> None:
    """Write the rows as one table; machine, versions and notes go into the file's metadata."""
    facts = {key: document[key] for key in ("backend", "interrupted", "notes", "machine", "versions")}
    metadata = {"schema_version": str(SCHEMA_VERSION), "kernel_bench": json.dumps(facts)}
    write_rows(path, document["rows"], metadata, text=("form", "failure"))


def write_plot(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw the fast step's speed-up and bandwidth against retention, without ops that were not timed.

    The document has at least one timed row of op fast; `kind` is "png" or "svg".
    """
    document = {**document, "rows": [row for row in document["rows"] if row["median_us"]]}
    rows = [row for row in document["rows"] if row["op"] == "fast"]
    rows.sort(key=lambda row: row["retention"])
    figure = new_figure(*INCHES)
    left, right = figure.subplots(1, 2)
    _draw_speedups(left, rows)
    _draw_bandwidth(right, document)
    for axes in (left, right):
        axes.set_xlabel("tokens read, % of the context")
        axes.set_xscale("log")
        ticks = _apart(sorted({100 * row["retention"] for row in rows}))
        axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks], rotation=60, fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    shape = rows[0]
    figure.suptitle(
        f"{name(document['machine'])}: {document['backend']} backend, {shape['context']:,} tokens, batch "
        f"{shape['batch']}, {shape['heads']}/{shape['kv_heads']} heads of {shape['head_dim']}, {shape['dtype']}",
        fontsize=10,
    )
    save(figure, path, kind=kind)


def _apart(ticks: list[float]) -> list[float]:
    # labels within a tenth of the next would overlap it
    following = [*ticks[1:], float("inf")]
    return [tick for tick, after in zip(ticks, following, strict=True) if after > 1.1 * tick]


def _draw_speedups(axes: Any, rows: list[dict[str, Any]]) -> None:
    for column, label, color, marker in LINES:
        points = [(100 * row["retention"], row[column]) for row in rows if row[column] is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker=marker, color=color, label=label)
    least, most = rows[0]["retention"], rows[-1]["retention"]
    paper = [(100 * r, x) for r, x in TABLE_1.items() if least <= r <= most]
    if paper:
        label = "paper, Table 1 (B200, its own dense)"
        axes.plot(*zip(*paper, strict=True), "--", color="gray", marker=".", label=label)
    ideal = [(100 * row["retention"], row["ideal_speedup"]) for row in rows]
    axes.plot(*zip(*ideal, strict=True), ":", color="black", label="bytes (context / tokens read)")
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_ylabel("speed-up of the fast step")


def _draw_bandwidth(axes: Any, document: dict[str, Any]) -> None:
    for op, label, color in (("fast", "fast", "tab:blue"), ("fast.gather", "fast, gathered in place", "tab:purple")):
        points = sorted((100 * row["retention"], row["gb_per_s"]) for row in document["rows"] if row["op"] == op)
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
    for row in document["rows"]:
        if row["op"] in ("dense", "dense.sdpa"):
            label, style = row["op"].replace("dense.sdpa", "PyTorch SDPA"), "--"
            color = "tab:orange" if row["op"] == "dense.sdpa" else "tab:cyan"
            axes.axhline(row["gb_per_s"], linestyle=style, color=color, label=label)
    copy = document["machine"]["copy_gb_per_s"]
    axes.axhline(copy, linestyle=":", color="black", label="copy, measured")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s of the bytes that must move")
