"""Tables of part `tasks`."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.study.listed import FULL
from benchmarks.study.markdown import table
from sfi_traces.results import wilson

Row = Mapping[str, Any]
ABLE = 0.6  # the least mean score of full attention at which a task says something of a method


def scores(rows: Sequence[Row], methods: Sequence[tuple[str, str]]) -> str:
    """Write a row a task, length, method and share: the mean score with its Wilson interval.

    Tasks that full attention itself does not answer are named below the table.
    """
    by_task = defaultdict(list)
    for row in rows:
        if "score" in row:
            by_task[row["task"], row["length"]].append(row)
    lines, weak = [], []
    for (task, length), some in sorted(by_task.items()):
        full = [row["score"] for row in some if row["method"] == FULL]
        if not full or np.mean(full) < ABLE:
            weak.append(f"{task} at {length} ({_percent(full)})" if full else f"{task} at {length}")
            continue
        lines += [[task, str(length), *cells] for cells in _task(some, methods)]
    heads = ["task", "length", "method", "share", "score, %", "total reads", "samples"]
    note = f"\nFull attention scores below {100 * ABLE:.0f} %: {', '.join(weak)}.\n" if weak else ""
    return table(heads, lines) + note


def _task(rows: Sequence[Row], methods: Sequence[tuple[str, str]]) -> list[list[str]]:
    lines = []
    for label, method in methods:
        some = [row for row in rows if row["method"] == method]
        for share in sorted({row["share"] for row in some}, key=lambda share: share or 0):
            chosen = [row for row in some if row["share"] == share]
            total = np.mean([row["read"] + row["selecting"] for row in chosen])
            lines.append([
                label, "-" if share is None else f"{100 * share:g} %",
                _percent([row["score"] for row in chosen]), f"{100 * total:.1f} %", str(len(chosen)),
            ])  # fmt: skip
    return lines


def _percent(score: Sequence[float]) -> str:
    interval = wilson(score)
    return f"{100 * interval.mean:.0f} ({100 * interval.low:.0f} to {100 * interval.high:.0f})"
