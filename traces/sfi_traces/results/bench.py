"""The decoding benchmark's document as a Parquet table and as a figure of throughput against context."""

import json
from pathlib import Path
from typing import Any

from sfi_core.machine.describe import name
from sfi_traces.figures.style import new_figure, save
from sfi_traces.results.parquet import write_rows

SCHEMA_VERSION = 1
INCHES_A_PANEL = (5.6, 4.4)
COLORS = {
    "sfi": "tab:blue",
    "sfi-lossless": "midnightblue",
    "full-kv": "tab:orange",
    "transformers-dynamic": "tab:red",
    "transformers-static": "tab:brown",
}
OTHER_COLORS = ("tab:green", "tab:purple", "tab:olive", "tab:pink", "tab:gray")
LISTS, TEXTS = ("repeat_rates",), ("not_replayed", "acceptance")


def write_parquet(document: dict[str, Any], path: Path) -> None:
    """Write the rows as one table; the document's other entries go into the file's metadata."""
    facts = {key: value for key, value in document.items() if key != "rows"}
    metadata = {"schema_version": str(SCHEMA_VERSION), "bench": json.dumps(facts)}
    write_rows(path, document["rows"], metadata, text=TEXTS, lists=LISTS)


def write_plot(document: dict[str, Any], path: Path, *, kind: str) -> None:
    """Draw tokens per second against context, a panel for each batch: measured solid, byte bound dashed.

    The document, a benchmark's or a forecast's, has at least one row; `kind` is "png" or "svg".
    """
    rows = document["rows"]
    batches = sorted({row["batch"] for row in rows})
    width, height = INCHES_A_PANEL
    figure = new_figure(width * len(batches), height)
    colors = _colors([row["policy"] for row in rows])
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        _draw(axes, [row for row in rows if row["batch"] == batch], colors)
        axes.set_title(f"batch {batch}", fontsize=10)
    figure.suptitle(
        f"{document['model']['name']}, {document['model']['dtype']}, {name(document['machine'])}: "
        "measured solid, what bytes allow dashed",
        fontsize=10,
    )
    save(figure, path, kind=kind)


def _colors(policies: list[str]) -> dict[str, str]:
    others = [policy for policy in dict.fromkeys(policies) if policy not in COLORS]
    rest = {policy: OTHER_COLORS[i % len(OTHER_COLORS)] for i, policy in enumerate(others)}
    return COLORS | rest


def _draw(axes: Any, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
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
