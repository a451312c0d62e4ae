"""Summarizes the rows of an evaluation: for each task, length, method and size, and over tasks and lengths."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sfi_core.measure.evaluation import statistics
from sfi_core.measure.evaluation.lossless_rows import drafting

REFERENCE = "full-kv"
PLACE = ("task", "length")
VARIANT = ("method", "size")
NAMES = ("method", "policy", "preset", "settings", "size", "share")
RATIOS = ("read_ratio", "selection_ratio", "stored_ratio")
FIDELITY = ("steps", "slow_rate", "kl", "kl_p95", "agreement", "perplexity", "perplexity_full", *RATIOS)
GROUPS = 8  # of neighboring sentences, at most
Row = Mapping[str, Any]
Place = tuple[Any, ...]  # a task and a length


def summarize(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Average the samples of each task, length, method and size, in the order of the rows.

    `score`, `low` and `high`: the mean and its Wilson interval. `difference`: paired, from full attention on
    the same samples, None without it. `read`: share read by attention and selection. `n`: scored samples;
    `failed`: those without a score, which no mean includes. `by_place`: share of right sentences by place in
    the answer. `lossless`: see `drafting`.
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


def by_place(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Average the scores of sentences at the same place of an answer; samples without sentences are skipped.

    A row for each group of neighboring sentences has the numbers of its `first` and `last` one, from 1 on,
    the first one's mean `place` in tokens, the mean `score`, and `n` sentences over all samples.
    """
    known = [row for row in rows if row.get("sentence_scores")]
    most = max((len(row["sentence_scores"]) for row in known), default=0)
    count = min(GROUPS, most)
    edges = [round(group * most / count) for group in range(count + 1)] if count else []
    groups = []
    for first, end in pairwise(edges):
        scores = [score for row in known for score in row["sentence_scores"][first:end]]
        places = [place for row in known for place in row["sentence_places"][first : first + 1]]
        groups.append(
            {
                "first": first + 1,
                "last": end,
                "place": sum(places) / len(places),
                "score": sum(scores) / len(scores),
                "n": len(scores),
            }
        )
    return groups


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
        **interval_of(score, "score"),
        **interval_of(difference, "difference"),
        "interval_method": difference and difference.method,
        "scores": _further(scored),
        "by_place": by_place(scored),
        "lossless": drafting(scored, full),
        **means,
        "read": _read(means),
        "slow_rate": sum(row["slow_steps"] for row in scored) / steps if steps else None,
    }


def interval_of(interval: statistics.Interval | None, name: str) -> dict[str, float | None]:
    """Return an interval as columns `name`, low and high; all None without an interval."""
    ends = ("low", "high") if name == "score" else (f"{name}_low", f"{name}_high")
    if interval is None:
        return dict.fromkeys((name, *ends))
    return {name: interval.mean, ends[0]: interval.low, ends[1]: interval.high}


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


def summarize_averages(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Average the scores of each method and size over tasks and lengths, each with the same weight.

    `difference` is from full attention on the same samples; `places` is the number of tasks x lengths. All
    but `places` are None if a method lacks a score at one of them.
    """
    rows = list(rows)
    full = {place: _scored(group) for place, group in _grouped(rows, PLACE).items()}
    full = {place: [row for row in group if row["policy"] == REFERENCE] for place, group in full.items()}
    return [
        {**{name: group[0][name] for name in NAMES}, **_average(_grouped(_scored(group), PLACE), full)}
        for group in _grouped(rows, VARIANT).values()
    ]


def _average(scored: Mapping[Place, Sequence[Row]], full: Mapping[Place, Sequence[Row]]) -> dict[str, Any]:
    # of one method and size; `full` has full attention's rows at every place
    groups = [scored.get(place, ()) for place in full]
    pairs = []
    for group, references in zip(groups, full.values(), strict=True):
        reference = {row["seed"]: row["score"] for row in reversed(references)}
        pairs.append([row["score"] - reference[row["seed"]] for row in group if row["seed"] in reference])
    score = difference = None
    means: dict[str, float | None] = dict.fromkeys(RATIOS)
    if all(groups):
        score = statistics.mean_of_groups([[row["score"] for row in group] for group in groups])
        if all(pairs):
            difference = statistics.difference_of_groups(pairs)
        means = {name: _mean(_mean(row[name] for row in group) or 0.0 for group in groups) for name in RATIOS}
    return {
        "places": len(full),
        "n": sum(map(len, groups)),
        **interval_of(score, "score"),
        **interval_of(difference, "difference"),
        "interval_method": difference and difference.method,
        "read": _read(means),
        "stored_ratio": means["stored_ratio"],
    }
