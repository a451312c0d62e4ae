"""Tables of the list's `ahead`: a method that chooses half a layer ahead, beside itself without that."""

import re
from collections.abc import Sequence

import numpy as np

from benchmarks.study.bootstrap import estimate
from benchmarks.study.markdown import table
from benchmarks.study.measured import COLUMNS, KL, TOTAL, Measured, Which
from benchmarks.study.part import Row

AHEAD = re.compile(r",\w+\.ahead=half")
Named = Sequence[tuple[str, str]]  # label and text of each method


def pairs(data: Measured, methods: Named) -> list[tuple[str, str, str]]:
    """Return label and text of each measured method that chooses ahead, and the text of its measured base."""
    have = {method for method, _ in data.windows}
    named = [(label, method, AHEAD.sub("", method)) for label, method in methods]
    return [pair for pair in named if pair[1] != pair[2] and {pair[1], pair[2]} <= have]


def times(data: Measured, methods: Named, shares: Sequence[float]) -> str:
    """Write a row a share of a method that chooses ahead: its KL, its base's on the same windows, and the ratio."""
    rows = []
    for label, method, base in pairs(data, methods):
        for share in shares:
            both: tuple[Which, Which] = ((method, share), (base, share))
            values = data.by_kind(*both)
            if values:
                ahead, not_ahead, reads = (
                    estimate(values, lambda mean, at=at: mean[..., at]) for at in (KL, len(COLUMNS) + KL, TOTAL)
                )
                ratio = estimate(values, lambda mean: mean[..., KL] / mean[..., len(COLUMNS) + KL])
                cells = [f"{100 * share:g} %", ahead.text(), not_ahead.text(), ratio.text()]
                rows.append([label, *cells, f"{100 * reads.value:.1f} %", str(sum(map(len, values.values())))])
    return table(["method", "share", "KL, ahead", "KL, not ahead", "times", "total reads", "windows"], rows)


def recalled(rows: Sequence[Row], methods: Named) -> str:
    """Write a row a method and share: which part of the likeliest positions and of all probability audited steps read.

    Both are means over layers, KV heads, steps and windows. The layers are those that lose most of the probability
    beside the method's base on the same windows, numbered among those that attend fully.
    """
    retained = {(row["method"], row["share"], row["kind"], row["number"]): row for row in rows if row.get("retained")}
    lines = []
    for label, method in methods:
        for share in sorted({key[1] for key in retained if key[0] == method}):
            some = [row for key, row in retained.items() if key[:2] == (method, share)]
            recall, share_read = (float(np.mean([row[name] for row in some])) for name in ("recall", "retained"))
            lines.append([label, f"{100 * share:g} %", f"{recall:.3f}", f"{share_read:.3f}"])
            base = [retained.get((AHEAD.sub("", method), *key[1:])) for key in retained if key[:2] == (method, share)]
            lines[-1] += [_losses(some, base) if method != AHEAD.sub("", method) and all(base) else "-", str(len(some))]
    heads = ["method", "share", "recall", "probability read", "full-attention layers that lose most of it", "windows"]
    return table(heads, lines)


def _losses(ahead: Sequence[Row], base: Sequence[Row | None]) -> str:
    lost_L = np.mean([np.subtract(b["retained"], a["retained"]) for a, b in zip(ahead, base, strict=True) if b], 0)
    worst = np.argsort(-lost_L)[:3]
    return ", ".join(f"{layer}: {lost_L[layer]:.3f}" for layer in worst)
