"""Supports by place in the sentence and by lag, against sentences of the same lengths put elsewhere.

A step of place 0 reads a token that ends a sentence (Eq. 5 makes it slow); place 1 is the step after it.
"""

from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.study.supports import Floats, Ints, Shared

EDGES = (0, 1, 2, 4, 8, 16, 32, 1 << 20)  # where groups of places, ages and steps begin
LAGS = (1, 2, 4, 8, 16, 32, 64)
PERMUTATIONS = 200
GAPS = ("across 0", "across 1", "lag 4", "lag 16")


def by_place(value_N: Floats, place_N: Ints) -> list[float]:
    """Return the mean over the steps of each group of places; NaN where a group is empty."""
    return [_mean(value_N[(place_N >= low) & (place_N < high)]) for low, high in pairwise(EDGES)]


def by_lag(overlap_NN: Floats, place_N: Ints) -> dict[str, list[float]]:
    """Return the mean overlap of steps that are a lag apart, in the same sentence and across a boundary."""
    begin_N = np.arange(len(place_N)) - place_N
    same, across = [], []
    for lag in LAGS:
        value = np.diagonal(overlap_NN, -lag)
        whole = begin_N[lag:] == begin_N[: len(value)]
        same.append(_mean(value[whole]))
        across.append(_mean(value[~whole]))
    return {"same": same, "across": across}


def gaps(overlap_NN: Floats, place_N: Ints) -> list[float]:
    """Return by how much supports agree less across a boundary than within a sentence; see `GAPS`.

    `across 0` compares consecutive steps before a boundary token with those from place 2 on, `across 1` those
    before the first token after a boundary. `lag n` compares steps that are n apart.
    """
    next_N = np.diagonal(overlap_NN, -1)
    place = place_N[1:]
    within = _mean(next_N[place >= 2])  # noqa: PLR2004 - neither boundary token nor the one after
    lagged = by_lag(overlap_NN, place_N)
    differences = [a - b for a, b in zip(lagged["same"], lagged["across"], strict=True)]
    return [
        within - _mean(next_N[place == 0]),
        within - _mean(next_N[place == 1]),
        differences[LAGS.index(4)],
        differences[LAGS.index(16)],
    ]


def shuffled(place_N: Ints, rng: np.random.Generator) -> Ints:
    """Return the places when all sentences but the first, cut one are put in another order."""
    ends = [*np.flatnonzero(place_N == 0), len(place_N)]
    lengths = np.diff(ends)
    rng.shuffle(lengths)
    return np.concatenate([place_N[: ends[0]], *(np.arange(length) for length in lengths)])


def retained(shared: Shared, place_N: Ints) -> dict[str, list[float]]:
    """Return what an old support still holds, as a share of what the step's own support holds.

    `boundary`: the support of the sentence's boundary token; `next`: of the token after it; `any`: of any
    step as long ago as the boundary. By the support's age; `mass` is the probability that `boundary` holds.
    """
    best_UN = np.diagonal(shared.mass_UNN, axis1=1, axis2=2)
    ratio_UNN = shared.mass_UNN / np.maximum(best_UN, 1e-9)[:, :, None]
    ratio_NN, mass_NN = ratio_UNN.mean(0), shared.mass_UNN.mean(0)
    step_N = np.arange(len(place_N))
    of_age = [float(np.diagonal(ratio_NN, -age).mean()) for age in step_N]
    means: dict[str, list[float]] = {}
    for name, first in (("boundary", 0), ("next", 1)):
        chosen_N = step_N - place_N + first
        steps = step_N[(chosen_N >= 0) & (chosen_N <= step_N) & (step_N >= place_N)]
        age = steps - chosen_N[steps]
        means[name] = by_place(ratio_NN[steps, chosen_N[steps]], age)
        if first == 0:
            means["mass"] = by_place(mass_NN[steps, chosen_N[steps]], age)
            means["any"] = by_place(np.array([of_age[a] for a in age], np.float32), age)
    return means


def statistics(shared: Shared, place_N: Ints, *, seed: int) -> dict[str, Any]:
    """Sum a window up: all of the above, and the permuted gaps."""
    overlap_NN = shared.overlap_UNN.mean(0)
    place, rng = place_N[1:], np.random.default_rng(seed)
    return {
        "chance": shared.chance,
        "places": np.bincount(np.digitize(place, EDGES[1:]), minlength=len(EDGES) - 1).tolist(),
        "consecutive": by_place(np.diagonal(overlap_NN, -1), place),
        "by_lag": by_lag(overlap_NN, place_N),
        "retained": retained(shared, place_N),
        "gaps": gaps(overlap_NN, place_N),
        "shuffled": [[round(gap, 3) for gap in gaps(overlap_NN, shuffled(place_N, rng))] for _ in range(PERMUTATIONS)],
    }


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else float("nan")
