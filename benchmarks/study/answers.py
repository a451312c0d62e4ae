"""Tables of the parts `tasks` and `long`."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.study.bootstrap import Array, Estimate, estimates
from benchmarks.study.listed import FULL
from benchmarks.study.long import CHUNK
from benchmarks.study.markdown import table
from sfi_core.measure.evaluation.statistics import wilson

Row = Mapping[str, Any]
ABLE = 0.6  # the least mean score of full attention at which a task says something of a method
SPANS = (1, 2, 4, 8, 16, 32, 64)  # where groups of chunks begin


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


def first_differences(rows: Sequence[Row], methods: Sequence[tuple[str, str]]) -> str:
    """Write a row a method: where its own greedy answers leave full attention's."""
    lines = []
    for label, method in methods:
        own = [row["own"] for row in rows if row["method"] == method and row.get("own")]
        if own:
            tokens = rows[0]["tokens"]
            first = [
                tokens if one["first_difference"] is None else one["first_difference"]
                for one in own
            ]
            same = sum(one["first_difference"] is None for one in own)
            total = np.mean([one["read"] + one["selecting"] for one in own])
            low, middle, high = np.quantile(first, (0.25, 0.5, 0.75))
            lines.append([
                label, f"{middle:.0f} ({low:.0f} to {high:.0f})", f"{same} of {len(own)}",
                f"{100 * total:.1f} %", f"{np.mean([one['repeats'] for one in own]):.2f}",
            ])  # fmt: skip
    heads = [
        "method",
        "first other token, median and quartiles",
        "equal answers",
        "total reads",
        "repeats",
    ]
    return table(heads, lines)


def by_step(rows: Sequence[Row], methods: Sequence[tuple[str, str]]) -> str:
    """Write a row a method: KL by steps since the prompt, teacher-forced."""
    lines = []
    chunks = max((len(row["kl"]) for row in rows if "kl" in row), default=0)
    firsts = [0, *(one for one in SPANS if one < chunks)]
    for label, method in methods:
        found = step_estimates(rows, method, firsts)
        if found:
            lines.append([label, *(one.text() for one in found)])
    heads = [f"from step {1 + CHUNK * first}" for first in firsts]
    return table(["method", *heads], lines)


def step_estimates(rows: Iterable[Row], method: str, firsts: Sequence[int]) -> list[Estimate]:
    """Return a method's KL in groups of chunks that begin at `firsts`; empty without rows."""
    values: dict[str, list[list[float]]] = defaultdict(list)
    for row in rows:
        if row["method"] == method and "kl" in row:
            ends = [*firsts[1:], len(row["kl"])]
            groups = [row["kl"][low:high] for low, high in zip(firsts, ends, strict=True)]
            values[row["kind"]].append([float(np.mean(g)) if g else np.nan for g in groups])
    arrays: dict[str, Array] = {kind: np.array(one) for kind, one in values.items()}
    return estimates(arrays) if arrays else []


def _task(rows: Sequence[Row], methods: Sequence[tuple[str, str]]) -> list[list[str]]:
    found = []
    for label, method in methods:
        some = [row for row in rows if row["method"] == method]
        for share in sorted({row["share"] for row in some}, key=lambda one: one or 0):
            chosen = [row for row in some if row["share"] == share]
            total = np.mean([row["read"] + row["selecting"] for row in chosen])
            found.append([
                label, "-" if share is None else f"{100 * share:g} %",
                _percent([row["score"] for row in chosen]), f"{100 * total:.1f} %", str(len(chosen)),
            ])  # fmt: skip
    return found


def _percent(score: Sequence[float]) -> str:
    one = wilson(score)
    return f"{100 * one.mean:.0f} ({100 * one.low:.0f} to {100 * one.high:.0f})"
