"""Averages sentence scores by their place in the answer: shows where a long answer goes wrong."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

GROUPS = 8  # of neighboring sentences, at most

Row = Mapping[str, Any]


def by_place(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Average the scores of sentences at the same place of an answer; samples without sentences are skipped.

    Returns:
        A row for each group of neighboring sentences: the numbers of its `first` and `last` sentence, from 1
        on; the first one's mean `place` in tokens; the mean `score`; and `n` sentences over all samples.
    """
    known = [row for row in rows if row.get("sentence_scores")]
    most = max((len(row["sentence_scores"]) for row in known), default=0)
    count = min(GROUPS, most)
    edges = [round(group * most / count) for group in range(count + 1)] if count else []
    found = []
    for first, end in pairwise(edges):
        scores = [score for row in known for score in row["sentence_scores"][first:end]]
        places = [place for row in known for place in row["sentence_places"][first : first + 1]]
        found.append(
            {
                "first": first + 1,
                "last": end,
                "place": sum(places) / len(places),
                "score": sum(scores) / len(scores),
                "n": len(scores),
            }
        )
    return found
