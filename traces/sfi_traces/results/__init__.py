"""Summarizes the rows of an evaluation: for each task, length, method and size, with intervals of means."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

REFERENCE = "full-kv"
PLACE = ("task", "length")
VARIANT = ("method", "size")
NAMES = ("method", "policy", "preset", "settings", "size", "share")
RATIOS = ("read_ratio", "selection_ratio", "stored_ratio")
FIDELITY = ("steps", "slow_rate", "kl", "kl_p95", "agreement", "perplexity", "perplexity_full", *RATIOS)
Z = 1.959964  # two-sided 95 % of the normal distribution
RESAMPLES = 10_000
EDGES = (0.025, 0.975)
NOTHING = (None, None, None)  # in place of an interval
Row = Mapping[str, Any]
Place = tuple[Any, ...]  # a task and a length


class Interval(NamedTuple):
    """A mean, and its 95 % confidence interval from `low` to `high`."""

    mean: float
    low: float
    high: float


def wilson(scores: Sequence[float]) -> Interval:
    """Compute the Wilson score interval of the mean of scores in [0, 1] (Wilson 1927, JASA 22, 209-212).

    It holds for scores of 0 and 1 and is wider than necessary for others. Raise `ValueError` for none or one outside.
    """
    n = len(scores)
    if n == 0 or not 0 <= min(scores) <= max(scores) <= 1:
        raise ValueError(f"scores must be in [0, 1] and at least one, got {list(scores)}")
    mean, weight = math.fsum(scores) / n, 1 + Z**2 / n
    center = (mean + Z**2 / (2 * n)) / weight
    half = Z / weight * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    # ends that are exactly 0 or 1 (or the mean) must not be off by rounding
    low, high = max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half))
    return Interval(mean, low, high)


def paired_difference(scores: Sequence[float], others: Sequence[float], *, seed: int = 0) -> Interval:
    """Compute a percentile bootstrap interval of the mean of `scores - others` on the same samples (Efron 1979).

    Pairs are drawn together, so that a sample's difficulty cancels. Raise `ValueError` without pairs.
    """
    if not scores or len(scores) != len(others):
        raise ValueError(f"scores must come in pairs, got {len(scores)} and {len(others)}")
    difference = np.subtract(scores, others)
    drawn = np.random.default_rng(seed).integers(len(difference), size=(RESAMPLES, len(difference)))
    return Interval(float(difference.mean()), *np.quantile(difference[drawn].mean(1), EDGES).tolist())


def summarize(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Average the samples of each task, length, method and size, in the order of the rows.

    `score`, `low` and `high`: the mean and its Wilson interval. `difference`: paired, from full attention on
    the same samples, None without it. `read`: share read by attention and selection. `n`: scored samples;
    `failed`: those without a score, which no mean includes.
    """
    groups = grouped(rows, (*PLACE, *VARIANT))
    references: dict[Place, list[Row]] = {}
    for key, group in groups.items():
        if group[0]["policy"] == REFERENCE:
            references.setdefault(key[: len(PLACE)], _scored(group))
    return [_summary(group, references.get(key[: len(PLACE)], [])) for key, group in groups.items()]


def summarize_fidelity(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Summarize the windows of each length, method and size; a window's first step is dense and does not count."""
    from sfi_core.measure.evaluation.fidelity import from_rows  # noqa: PLC0415 - torch, for those who need it

    summaries = []
    for group in grouped(rows, ("length", *VARIANT)).values():
        known = [row for row in group if row["error"] is None]
        whole = from_rows(known).summary() if known else dict.fromkeys(FIDELITY)
        summaries.append(
            {
                **{name: group[0][name] for name in ("length", *NAMES)},
                "windows": len(known),
                "tokens": group[0]["tokens"],
                "failed": len(group) - len(known),
                "error": next((row["error"] for row in group if row["error"]), None),
                **{name: whole[name] for name in FIDELITY},
                "read": _read(whole),
            }
        )
    return summaries


def _read(ratios: Row) -> float | None:
    if ratios["read_ratio"] is None:
        return None
    return float(ratios["read_ratio"] + ratios["selection_ratio"])


def grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some columns."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _summary(group: Sequence[Row], full: Sequence[Row]) -> dict[str, Any]:
    scored, reference = _scored(group), {row["seed"]: row["score"] for row in full}
    first = group[0]
    pairs = [(row["score"], reference[row["seed"]]) for row in scored if row["seed"] in reference]
    difference = paired_difference(*zip(*pairs, strict=True)) if pairs else NOTHING
    score = wilson([row["score"] for row in scored]) if scored else NOTHING
    means = {name: _mean(row[name] for row in scored) for name in (*RATIOS, "generated", "tokens_per_second")}
    steps = sum(row["slow_steps"] + row["fast_steps"] for row in scored)
    return {
        **{name: first[name] for name in (*PLACE, *NAMES)},
        "n": len(scored),
        "failed": len(group) - len(scored),
        "error": next((row["error"] for row in group if row["error"]), None),
        **dict(zip(("score", "low", "high"), score, strict=True)),
        **dict(zip(("difference", "difference_low", "difference_high"), difference, strict=True)),
        "scores": _further(scored),
        **means,
        "read": _read(means),
        "slow_rate": sum(row["slow_steps"] for row in scored) / steps if steps else None,
    }


def _scored(group: Sequence[Row]) -> list[Row]:
    return [row for row in group if row["score"] is not None]


def _further(scored: Sequence[Row]) -> dict[str, float]:
    # means of the task's other measures, such as the share of right tokens, that are always numbers
    names = dict.fromkeys(name for row in scored for name in row["scores"])
    return {
        name: sum(row["scores"][name] for row in scored) / len(scored)
        for name in names
        if all(isinstance(row["scores"].get(name), int | float) for row in scored)
    }


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
