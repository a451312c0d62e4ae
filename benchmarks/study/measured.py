"""The rows of part `fidelity`, by method and share, as numbers of a window."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.study.bootstrap import Array
from benchmarks.study.listed import FULL

COLUMNS = ("kl", "reads", "disagreement", "slow", "nll", "kl_p95", "attended")
KL, TOTAL, ATTENDED = (COLUMNS.index(name) for name in ("kl", "reads", "attended"))
# the bound that no method reaches: where reads are compared, what its choice reads is left out
IDEAL = "oracle-top-k"
Where = tuple[str, int]  # kind and number of a window
Which = tuple[str, float | None]  # method and share


@dataclass(slots=True)
class Measured:
    """What every method measured on every window of one length.

    Attributes:
        windows: For each method and share, a window's `COLUMNS`.
    """

    windows: dict[Which, dict[Where, list[float]]] = field(default_factory=lambda: defaultdict(dict))

    def by_kind(self, *which: Which, kinds: Iterable[str] = ()) -> dict[str, Array]:
        """Return, by kind, [windows, methods * columns] of the windows that all these methods have."""
        table = self.windows
        common = set.intersection(*(set(table.get(key, {})) for key in which))
        wanted = set(kinds) or {kind for kind, _ in common}
        return {
            kind: np.array(
                [np.concatenate([table[key][where] for key in which]) for where in sorted(common) if where[0] == kind]
            )
            for kind in sorted(wanted & {kind for kind, _ in common})
        }

    def shares(self, method: str) -> list[float]:
        """Return the shares of a method that have rows."""
        return sorted(share for name, share in self.windows if name == method and share is not None)

    def count(self, which: Which) -> int:
        """Return the number of a method's windows."""
        return len(self.windows.get(which, {}))


def measured(rows: Iterable[Mapping[str, Any]]) -> Measured:
    """Sum rows of one model, half, length and number of tokens up by window."""
    data, full = Measured(), {}
    listed = list(rows)
    for row in listed:
        if row["method"] == FULL:
            full[row["kind"], row["number"]] = row
    for row in listed:
        where, which = (row["kind"], row["number"]), (row["method"], row["share"])
        if row["method"] != FULL and "error" not in row:
            data.windows[which][where] = _columns(row, full[where])
    return data


def _columns(row: Mapping[str, Any], full: Mapping[str, Any]) -> list[float]:
    kl = row["kl"][1:]
    return [
        float(np.mean(kl)),
        row["read"] + row["selecting"],
        row["agrees"][1:].count("0") / len(kl),
        row["slow"][1:].count("1") / len(kl),
        row["nll"] - float(np.mean(full["nll"][1:])),
        float(np.quantile(kl, 0.95)),
        row["read"],
    ]


def reads_column(method: str) -> int:
    """Return the column of a method's reads: the oracle's choice is free of charge."""
    return ATTENDED if method == IDEAL else TOTAL


def name_of(label: str, method: str) -> str:
    """Return a method's name where reads are compared."""
    return f"{label}, choice free" if method == IDEAL else label
