"""Which tokens the support moves after: found on `dev`, counted on `held`; as sfi_traces.tune.mining says."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.study.bootstrap import Estimate, estimate
from benchmarks.study.markdown import table

LEAST = 8  # occurrences of a token that is looked at
SHOWN = 15


@dataclass(frozen=True, slots=True)
class Moved:
    """A token, and by how much less than usual the supports of the next three steps overlap with its step's.

    The token's step is the one that has it as its outcome; the next step reads it.

    Attributes:
        token: Its id.
        count: Occurrences on `dev`.
        movement: The mean on `dev`, with its interval.
        held: The mean on `held`; None where `held` lacks the token.
    """

    token: int
    count: int
    movement: Estimate
    held: Estimate | None


def moving(dev: Iterable[Mapping[str, Any]], held: Iterable[Mapping[str, Any]]) -> list[Moved]:
    """Rank the tokens of `dev` by the lower end of their movement's interval."""
    seen, other = _movements(dev), _movements(held)
    found = [
        Moved(token, len(values), _mean(values), _mean(other[token]) if token in other else None)
        for token, values in seen.items()
        if len(values) >= LEAST
    ]
    return sorted(found, key=lambda one: -one.movement.low)


def moving_table(tokens: Iterable[Moved], name: Any) -> str:
    """Write the tokens that move the support most; `name` turns an id into text."""
    rows = [
        [
            f"`{name(one.token)!r}`", str(one.count), one.movement.text(2),
            one.held.text(2) if one.held else "-",
        ]
        for one in list(tokens)[:SHOWN]
    ]  # fmt: skip
    return table(["token", "times on dev", "movement on dev", "on held"], rows)


def _movements(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[float]]:
    # a window's steps against its own mean: kinds and windows differ in how stable they are
    found: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        usual = np.mean(row["after"])
        for token, overlap in zip(row["tokens_read"][1:], row["after"], strict=False):
            found[token].append(float(usual - overlap))
    return found


def _mean(values: list[float]) -> Estimate:
    return estimate({"all": np.array(values)[:, None]})
