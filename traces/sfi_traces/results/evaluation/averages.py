"""Averages an evaluation over tasks and lengths: one row for each method and size."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfi_core.measure.evaluation.statistics import difference_of_groups, mean_of_groups
from sfi_traces.results.evaluation.summary import NAMES, PLACE, RATIOS, REFERENCE, VARIANT, interval_of

Row = Mapping[str, Any]
Place = tuple[Any, ...]  # a task and a length


def summarize_averages(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Average the scores of each method and size over tasks and lengths, each with the same weight.

    `difference` is from full attention on the same samples; `places` is the number of tasks x lengths. All
    but `places` are None if a method lacks a score at one of them.
    """
    found: dict[tuple[Any, ...], dict[Place, list[Row]]] = {}
    names: dict[tuple[Any, ...], dict[str, Any]] = {}
    whole: dict[Place, dict[int, float]] = {}
    for row in rows:
        key, place = (tuple(row[name] for name in columns) for columns in (VARIANT, PLACE))
        names[key] = {name: row[name] for name in NAMES}
        own = found.setdefault(key, {}).setdefault(place, [])
        whole.setdefault(place, {})
        if row["score"] is None:
            continue
        own.append(row)
        if row["policy"] == REFERENCE:
            whole[place].setdefault(row["seed"], row["score"])
    return [{**names[key], **_average(own, whole)} for key, own in found.items()]


def _average(own: Mapping[Place, Sequence[Row]], whole: Mapping[Place, Mapping[int, float]]) -> dict[str, Any]:
    groups = [own.get(place, ()) for place in whole]
    pairs = [
        [row["score"] - full[row["seed"]] for row in group if row["seed"] in full]
        for group, full in zip(groups, whole.values(), strict=True)
    ]
    score = difference = read = stored = None
    if all(groups):
        score = mean_of_groups([[row["score"] for row in group] for group in groups])
        if all(pairs):
            difference = difference_of_groups(pairs)
        means = {name: _mean(groups, name) for name in RATIOS}
        read, stored = means["read_ratio"] + means["selection_ratio"], means["stored_ratio"]
    return {
        "places": len(whole),
        "n": sum(map(len, groups)),
        **interval_of(score, "score"),
        **interval_of(difference, "difference"),
        "interval_method": difference and difference.method,
        "read": read,
        "stored_ratio": stored,
    }


def _mean(groups: Sequence[Sequence[Row]], name: str) -> float:
    means = [sum(row[name] for row in group) / len(group) for group in groups]
    return float(sum(means) / len(means))
