"""Tables of part `stability`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from benchmarks.study.bootstrap import Array, estimates, mean_known
from benchmarks.study.front import PLACES
from benchmarks.study.markdown import table
from benchmarks.study.sentences import GAPS, LAGS

Row = Mapping[str, Any]
ROUNDED = 5e-4  # half of the last digit of a shuffled gap in the rows


def windows(rows: Iterable[Row], pick: Callable[[Row], Sequence[float | None]]) -> dict[str, Array]:
    """Return, by kind, what `pick` takes from each window: [windows, columns]; null becomes NaN."""
    ordered = sorted(rows, key=lambda row: (row["kind"], row["number"]))
    return {
        kind: np.array([pick(row) for row in group], np.float64)
        for kind, group in groupby(ordered, key=lambda row: row["kind"])
    }


def consecutive(rows: Sequence[Row]) -> str:
    """Write how much of a step's support was in the last step's, by the step's place in the sentence."""
    lines = []
    for name, some in _groups(rows):
        overlaps = estimates(windows(some, column("consecutive")))
        chance = np.mean([row["chance"] for row in some])
        lines.append([*name, *(overlap.text() for overlap in overlaps), f"{chance:.3f}"])
    return table(["decoded", "K", "kind", *PLACES, "chance"], lines)


def gaps(rows: Sequence[Row]) -> str:
    """Write by how much less supports agree across a boundary, beside shuffled sentences of equal lengths."""
    lines = []
    for name, some in _groups(rows):
        differences = estimates(windows(some, column("gaps")))
        lines += [[*name, gap, differences[at].text(), *_null(some, at)] for at, gap in enumerate(GAPS)]
    return table(["decoded", "K", "kind", "gap", "found", "shuffled, 95 %", "p"], lines)


def lags(rows: Sequence[Row]) -> str:
    """Write the overlap of supports that are a lag apart, in one sentence and across a boundary."""
    lines = []
    for name, some in _groups(rows, kinds=False):
        for where in ("same", "across"):
            overlaps = estimates(windows(some, column("by_lag", where)))
            lines.append([*name[:2], where, *(overlap.text() for overlap in overlaps)])
    return table(["decoded", "K", "sentence", *map(str, LAGS)], lines)


def retained(rows: Sequence[Row]) -> str:
    """Write what share of the best support's probability an older one holds, by its age."""
    lines = []
    for name, some in _groups(rows, kinds=False):
        for which in ("boundary", "next", "any", "mass"):
            shares = estimates(windows(some, column("retained", which)))
            lines.append([*name[:2], which, *(share.text() for share in shares)])
    return table(["decoded", "K", "support of", *PLACES], lines)


def heads(rows: Sequence[Row]) -> str:
    """Write how many KV heads attend mostly to the first 4 and the last 128 positions; one may on every kind."""
    some = [row for row in rows if (row["mode"], row["size"]) == ("forced", 64) and "local" in row]
    by_kind = windows(some, lambda row: [share for layer in row["local"] for share in layer])
    means = {kind: mean_known(array, 0) for kind, array in by_kind.items()}
    if means:
        means["the least of all kinds"] = np.min(np.stack(list(means.values())), 0)
    above = (0.95, 0.9, 0.8, 0.5)
    lines = [[kind, *(f"{np.sum(mean >= share)}" for share in above), str(len(mean))] for kind, mean in means.items()]
    return table(["kind", *(f"{100 * share:.0f} % or more" for share in above), "heads"], lines)


def column(name: str, inner: str = "") -> Callable[[Row], Sequence[float | None]]:
    """Return what takes a row's entry, or an entry of the entry, for `windows`."""

    def pick(row: Row) -> Sequence[float | None]:
        values: Sequence[float | None] = row[name][inner] if inner else row[name]
        return values

    return pick


def _null(rows: Sequence[Row], at: int) -> tuple[str, str]:
    # each window shuffled once a permutation, then the mean over kinds as for what was found
    values = windows(rows, lambda row: [row["gaps"][at], *(permutation[at] for permutation in row["shuffled"])])
    means = mean_known(np.stack([mean_known(array, 0) for array in values.values()]), 0)
    observed, shuffled = means[0], means[1:][np.isfinite(means[1:])]
    if not len(shuffled):
        return "-", "-"
    low, high = np.quantile(shuffled, (0.025, 0.975))
    p = (1 + np.sum(shuffled >= observed - ROUNDED)) / (1 + len(shuffled))
    return f"{low:.3f} to {high:.3f}", f"{p:.3f}"


def _groups(rows: Sequence[Row], *, kinds: bool = True) -> list[tuple[tuple[str, str, str], list[Row]]]:
    # by what was decoded and the support's size: all kinds together, then each
    groups = []
    for mode, size in sorted({(row["mode"], row["size"]) for row in rows}):
        some = [row for row in rows if (row["mode"], row["size"]) == (mode, size)]
        groups.append(((mode, str(size), "all"), some))
        groups += [
            ((mode, str(size), kind), [row for row in some if row["kind"] == kind])
            for kind in (sorted({row["kind"] for row in some}) if kinds else ())
        ]
    return groups
