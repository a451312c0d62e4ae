"""Tables of the part `lossless`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.study.markdown import table

Row = Mapping[str, Any]
HEADS = (
    "method", "equal answers", "kept a token", "kept of drafted", "accepted a verification", "passes a token",
    "total reads", "alone: total reads", "alone: first other token",
)  # fmt: skip


def drafts(rows: Sequence[Row], methods: Sequence[tuple[str, str]]) -> str:
    """Write a row a method, over all windows: counts are summed, reads and passes are means."""
    lines = []
    for label, method in methods:
        own = [row for row in rows if row["method"] == method and "accepted" in row]
        if own:
            lines.append([label, *_cells(own)])
    return table(HEADS, lines)


def by_kind(rows: Sequence[Row], methods: Sequence[tuple[str, str]], kinds: Sequence[str]) -> str:
    """Write a row a method: tokens accepted a verification, and reads, for each kind of text."""
    lines = []
    for label, method in methods:
        own = [row for row in rows if row["method"] == method and "accepted" in row]
        if own:
            lines.append([label, *(_kind([row for row in own if row["kind"] == k]) for k in kinds)])
    return table(["method", *kinds], lines)


def _cells(own: Sequence[Row]) -> list[str]:
    sums = {name: sum(row[name] for row in own) for name in ("accepted", "tested", "drafted")}
    first = [row["plain_first_difference"] for row in own]
    tokens = [row["tokens"] if at is None else at for row, at in zip(own, first, strict=True)]
    return [
        f"{sum(row['same'] for row in own)} of {len(own)}",
        f"{sums['accepted'] / max(1, sums['tested']):.3f}",
        f"{sums['accepted'] / max(1, sums['drafted']):.2f}",
        f"{sums['accepted'] / sum(row['verifications'] for row in own):.1f}",
        f"{np.mean([row['passes'] for row in own]):.2f}",
        f"{100 * np.mean([_read(row) for row in own]):.1f} %",
        f"{100 * np.mean([row['plain_read'] for row in own]):.1f} %",
        f"{np.median(tokens):.0f}",
    ]


def _kind(own: Sequence[Row]) -> str:
    if not own:
        return "-"
    accepted = sum(row["accepted"] for row in own) / sum(row["verifications"] for row in own)
    return f"{accepted:.1f}, {100 * np.mean([_read(row) for row in own]):.0f} %"


def _read(row: Row) -> float:
    total: float = row["read"] + row["selecting"]
    return total
