"""What the samples of all tasks and lengths come to: one weighted mean for each method and size."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfi_core.measure.evaluation.weighted import weighted_difference, weighted_mean
from sfi_traces.results.evaluation.summary import (
    NAMES,
    PLACE,
    RATIOS,
    REFERENCE,
    VARIANT,
    interval_of,
)

Row = Mapping[str, Any]
Place = tuple[Any, ...]  # a task and a length


def summarize_averages(
    rows: Iterable[Row], weights: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Average the scores of each method and size over tasks and lengths.

    Args:
        rows: The samples' rows.
        weights: Weights of tasks, at each of their lengths; 1 for a task without one.

    Returns:
        Plain rows: `score`, `low` and `high` of the weighted mean; `difference` to full attention on the
        same samples; `read` and `stored_ratio`, weighted in the same way; `places`, the tasks and lengths,
        and `weights`. A method without a score at one of the places has none here.
    """
    found: dict[tuple[Any, ...], dict[Place, list[Row]]] = {}
    whole: dict[Place, dict[int, float]] = {}
    for row in rows:
        place = tuple(row[name] for name in PLACE)
        own = found.setdefault(tuple(row[name] for name in VARIANT), {}).setdefault(place, [])
        whole.setdefault(place, {})
        if row["score"] is None:
            continue
        own.append(row)
        if row["policy"] == REFERENCE:
            whole[place].setdefault(row["seed"], row["score"])
    names = {
        tuple(row[name] for name in VARIANT): {name: row[name] for name in NAMES} for row in rows
    }
    chosen = {place: (weights or {}).get(place[0], 1.0) for place in whole}
    return [{**names[key], **_average(own, whole, chosen)} for key, own in found.items()]


def _average(
    groups: Mapping[Place, Sequence[Row]],
    whole: Mapping[Place, Mapping[int, float]],
    weights: Mapping[Place, float],
) -> dict[str, Any]:
    complete = all(groups.get(place) for place in whole)
    pairs = {
        place: [
            row["score"] - whole[place][row["seed"]]
            for row in groups.get(place, ())
            if row["seed"] in whole[place]
        ]
        for place in whole
    }
    score = difference = None
    if complete:
        score = weighted_mean([(weights[p], [row["score"] for row in groups[p]]) for p in whole])
        if all(pairs.values()):
            difference = weighted_difference([(weights[place], pairs[place]) for place in whole])
    means = {name: _mean(groups, weights, name) if complete else None for name in RATIOS}
    read, selection = means["read_ratio"], means["selection_ratio"]
    return {
        "places": len(whole),
        "n": sum(map(len, groups.values())),
        **interval_of(score, "score"),
        **interval_of(difference, "difference"),
        "interval_method": difference and difference.method,
        "read": None if read is None or selection is None else read + selection,
        "stored_ratio": means["stored_ratio"],
        "weights": {str(task): weight for (task, _), weight in weights.items()},
    }


def _mean(
    groups: Mapping[Place, Sequence[Row]], weights: Mapping[Place, float], name: str
) -> float:
    total = sum(weights.values())
    found = 0.0
    for place, weight in weights.items():
        found += weight / total * sum(row[name] for row in groups[place]) / len(groups[place])
    return found
