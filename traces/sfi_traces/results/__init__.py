"""Results of benchmarks and evaluations: an evaluation's rows, summarized by task, length, method and size."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sfi_core.measure.evaluation import statistics

REFERENCE = "full-kv"
PLACE = ("task", "length")
VARIANT = ("method", "size")
NAMES = ("method", "policy", "preset", "settings", "size", "share")
RATIOS = ("read_ratio", "selection_ratio", "stored_ratio")
FIDELITY = ("steps", "slow_rate", "kl", "kl_p95", "agreement", "perplexity", "perplexity_full", *RATIOS)
Row = Mapping[str, Any]
Place = tuple[Any, ...]  # a task and a length


def summarize(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Average the samples of each task, length, method and size, in the order of the rows.

    `score`, `low` and `high`: the mean and its Wilson interval. `difference`: paired, from full attention on
    the same samples, None without it. `read`: share read by attention and selection. `n`: scored samples;
    `failed`: those without a score, which no mean includes.
    """
    groups = _grouped(rows, (*PLACE, *VARIANT))
    references: dict[Place, list[Row]] = {}
    for key, group in groups.items():
        if group[0]["policy"] == REFERENCE:
            references.setdefault(key[: len(PLACE)], _scored(group))
    return [_summary(group, references.get(key[: len(PLACE)], [])) for key, group in groups.items()]


def summarize_fidelity(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Summarize the windows of each length, method and size.

    KL, agreement and perplexities are over all steps except each window's first, which is full attention's;
    the same by position in the sentence; ratios are averaged over windows.
    """
    from sfi_core.measure.evaluation.windows import from_rows  # noqa: PLC0415 - torch, for those who need it

    summaries = []
    for group in _grouped(rows, ("length", *VARIANT)).values():
        known = [row for row in group if row["error"] is None]
        fidelity = from_rows(known)
        whole = fidelity.summary() if known else dict.fromkeys(FIDELITY)
        summaries.append(
            {
                **{name: group[0][name] for name in ("length", *NAMES)},
                "windows": len(known),
                "tokens": group[0]["tokens"],
                "failed": len(group) - len(known),
                "error": next((row["error"] for row in group if row["error"]), None),
                **{name: whole[name] for name in FIDELITY},
                "read": _read(whole),
                "by_sentence_position": fidelity.by_sentence_position(),
            }
        )
    return summaries


def _read(ratios: Row) -> float | None:
    if ratios["read_ratio"] is None:
        return None
    return float(ratios["read_ratio"] + ratios["selection_ratio"])


def _grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def _summary(group: Sequence[Row], full: Sequence[Row]) -> dict[str, Any]:
    scored, reference = _scored(group), {row["seed"]: row["score"] for row in full}
    first = group[0]
    pairs = [(row["score"], reference[row["seed"]]) for row in scored if row["seed"] in reference]
    difference = statistics.paired_difference(*zip(*pairs, strict=True)) if pairs else None
    score = statistics.wilson([row["score"] for row in scored]) if scored else None
    means = {name: _mean(row[name] for row in scored) for name in (*RATIOS, "generated", "tokens_per_second")}
    steps = sum(row["slow_steps"] + row["fast_steps"] for row in scored)
    return {
        **{name: first[name] for name in (*PLACE, *NAMES)},
        "n": len(scored),
        "failed": len(group) - len(scored),
        "error": next((row["error"] for row in group if row["error"]), None),
        **_interval(score, "score", "low", "high"),
        **_interval(difference, "difference", "difference_low", "difference_high"),
        "scores": _further(scored),
        **means,
        "read": _read(means),
        "slow_rate": sum(row["slow_steps"] for row in scored) / steps if steps else None,
    }


def _interval(interval: statistics.Interval | None, mean: str, low: str, high: str) -> dict[str, float | None]:
    if interval is None:
        return dict.fromkeys((mean, low, high))
    return {mean: interval.mean, low: interval.low, high: interval.high}


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
