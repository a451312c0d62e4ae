"""The table of long texts: KL by how far a method has come."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from benchmarks.study.bootstrap import estimates
from benchmarks.study.markdown import table
from benchmarks.study.observed import windows

LONG = 512  # decoded tokens that make a text long
STEPS = (1, 33, 65, 129, 257, 513, 1025)


def by_step(rows: Sequence[Mapping[str, Any]], methods: Sequence[tuple[str, str]], share: float) -> str:
    """Write a row a method: mean KL of the steps from each to the next, and total reads."""
    lines = []
    for label, method in methods:
        some = [row for row in rows if (row["method"], row["share"]) == (method, share) and "error" not in row]
        if some:
            by_kind = windows(some, lambda row: [sum(row["kl"][a:b]) / len(row["kl"][a:b]) for a, b in pairwise(STEPS)])
            reads = estimates(windows(some, lambda row: [100 * (row["read"] + row["selecting"])]))
            lines.append([label, *(kl.text() for kl in estimates(by_kind)), f"{reads[0].value:.1f} %"])
    return table(["method", *(f"step {a} to {b - 1}" for a, b in pairwise(STEPS)), "total reads"], lines)
