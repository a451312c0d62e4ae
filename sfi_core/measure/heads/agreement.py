"""Agreement of the clusters of disjoint parts of a corpus (SyncKV, B.1, robustness)."""

from collections.abc import Sequence
from itertools import combinations


def pair_agreement(first: Sequence[int], second: Sequence[int]) -> float:
    """Return the share of head pairs on which two clusterings agree: both join or both separate (Rand index).

    The numbers of the clusters do not matter. Without a pair (one head) the share is 1.

    Paper gap: the paper reports no measure ("the vast majority of heads remained consistent"). The plain
    share is not adjusted for chance: two clusters of eight heads agree on about half of the pairs by chance.
    """
    pairs = list(combinations(range(len(first)), 2))
    if not pairs:
        return 1.0
    same = [(first[i] == first[j]) == (second[i] == second[j]) for i, j in pairs]
    return sum(same) / len(pairs)


def mean_agreement(clusterings: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the mean and the least `pair_agreement` over the pairs of at least two clusterings."""
    shares = [pair_agreement(first, second) for first, second in combinations(clusterings, 2)]
    return sum(shares) / len(shares), min(shares)
