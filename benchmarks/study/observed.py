"""Tables of part `stability`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from benchmarks.study.bootstrap import Array, Estimate, estimate, estimates, mean_known
from benchmarks.study.front import PLACES
from benchmarks.study.markdown import table
from benchmarks.study.sentences import GAPS, LAGS

Row = Mapping[str, Any]
AGES = PLACES
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
        found = estimates(windows(some, column("consecutive")))
        chance = np.mean([row["chance"] for row in some])
        lines.append([*name, *(one.text() for one in found), f"{chance:.3f}"])
    return table(["decoded", "K", "kind", *PLACES, "chance"], lines)


def gaps(rows: Sequence[Row]) -> str:
    """Write by how much less supports agree across a boundary, beside shuffled sentences of equal lengths."""
    lines = []
    for name, some in _groups(rows):
        found = estimates(windows(some, column("gaps")))
        lines += [[*name, gap, found[at].text(), *_null(some, at)] for at, gap in enumerate(GAPS)]
    return table(["decoded", "K", "kind", "gap", "found", "shuffled, 95 %", "p"], lines)


def lags(rows: Sequence[Row]) -> str:
    """Write the overlap of supports that are a lag apart, in one sentence and across a boundary."""
    lines = []
    for name, some in _groups(rows, kinds=False):
        for where in ("same", "across"):
            found = estimates(windows(some, column("by_lag", where)))
            lines.append([*name[:2], where, *(one.text() for one in found)])
    return table(["decoded", "K", "sentence", *map(str, LAGS)], lines)


def retained(rows: Sequence[Row]) -> str:
    """Write what share of the best support's probability an older one holds, by its age."""
    lines = []
    for name, some in _groups(rows, kinds=False):
        for which in ("boundary", "next", "any", "mass"):
            found = estimates(windows(some, column("retained", which)))
            lines.append([*name[:2], which, *(one.text() for one in found)])
    return table(["decoded", "K", "support of", *AGES], lines)


def drift(rows: Sequence[Row]) -> str:
    """Write the overlap with the prompt's support, and with the step before, by steps since the prompt."""
    lines = []
    for name, some in _groups(rows, kinds=False):
        for which in ("drift", "drift_consecutive"):
            found = estimates(windows(some, column(which)))
            label = "the prompt" if which == "drift" else "the step before"
            lines.append([*name[:2], label, *(one.text() for one in found[1:])])
    return table(["decoded", "K", "overlap with", *PLACES[1:]], lines)


def heads(rows: Sequence[Row]) -> str:
    """Write the overlap of a layer's heads, the queries' cosine, and the spread over heads of stability."""
    lines = []
    for name, some in _groups(rows, kinds=False):
        alike = estimate(windows(some, lambda row: [float(np.mean(row["alike"]))]))
        cosine = estimates(windows(some, column("cosine_places")))
        within = np.mean([row["by_head"]["2+"] for row in some if row["by_head"]["2+"]], 0)
        low, middle, high = np.quantile(within, (0, 0.5, 1))
        lines.append([
            *name[:2], alike.text(), *(cosine[at].text() for at in (0, 1, 2)),
            f"{middle:.2f} ({low:.2f} to {high:.2f})",
        ])  # fmt: skip
    names = [
        "two heads' overlap",
        "query cosine at 0",
        "at 1",
        "at 2-3",
        "heads' overlap, median and range",
    ]
    return table(["decoded", "K", *names], lines)


def layers(rows: Sequence[Row], mode: str, size: int) -> dict[str, list[Estimate]]:
    """Return by layer: the overlap of consecutive supports at places 0, 1 and beyond."""
    some = [row for row in rows if row["mode"] == mode and row["size"] == size]
    found = {}
    for place in ("0", "1", "2+"):
        have = [row for row in some if row["by_head"][place]]
        if have:
            count = len(have[0]["alike"])

            def by_layer(row: Row, place: str = place, count: int = count) -> list[float]:
                means: list[float] = np.reshape(row["by_head"][place], (count, -1)).mean(1).tolist()
                return means

            found[place] = estimates(windows(have, by_layer))
    return found


def column(name: str, inner: str = "") -> Callable[[Row], Sequence[float | None]]:
    """Return what takes a row's entry, or an entry of the entry, for `windows`."""

    def pick(row: Row) -> Sequence[float | None]:
        found: Sequence[float | None] = row[name][inner] if inner else row[name]
        return found

    return pick


def _null(rows: Sequence[Row], at: int) -> tuple[str, str]:
    # each window shuffled once a permutation, then the mean over kinds as for what was found
    values = windows(rows, lambda row: [row["gaps"][at], *(one[at] for one in row["shuffled"])])
    means = mean_known(np.stack([mean_known(one, 0) for one in values.values()]), 0)
    observed, shuffled = means[0], means[1:][np.isfinite(means[1:])]
    if not len(shuffled):
        return "-", "-"
    low, high = np.quantile(shuffled, (0.025, 0.975))
    p = (1 + np.sum(shuffled >= observed - ROUNDED)) / (1 + len(shuffled))
    return f"{low:.3f} to {high:.3f}", f"{p:.3f}"


def _groups(
    rows: Sequence[Row], *, kinds: bool = True
) -> list[tuple[tuple[str, str, str], list[Row]]]:
    # by what was decoded and the support's size: all kinds together, then each
    found = []
    for mode, size in sorted({(row["mode"], row["size"]) for row in rows}):
        some = [row for row in rows if (row["mode"], row["size"]) == (mode, size)]
        found.append(((mode, str(size), "all"), some))
        found += [
            ((mode, str(size), kind), [row for row in some if row["kind"] == kind])
            for kind in (sorted({row["kind"] for row in some}) if kinds else ())
        ]
    return found
