"""The clusters of every layer, over all texts and over disjoint parts of the texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.measure.heads.clustering import Labels, Matrix, Similarity, check_count, cluster, joined

PARTS = 2  # default number of parts
Sums = Mapping[int, Similarity]  # by layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerClusters:
    """The clusters of one layer's KV heads.

    Attributes:
        similarity_HH: S of every two heads, over all texts.
        agreement: Mean and least share of head pairs on which two parts agree; None with one part.
        same_representatives: Share of the parts that choose these representatives; None with one part.
    """

    layer: int
    similarity_HH: Matrix
    cluster_of: Labels
    representatives: Labels
    agreement: tuple[float, float] | None
    same_representatives: float | None

    def mean(self, *, within: bool) -> float | None:
        """Return the mean similarity of two heads of one cluster, or of two clusters; None without a pair."""
        label_H = self.cluster_of
        found = [
            float(self.similarity_HH[i, j])
            for i, j in combinations(range(len(label_H)), 2)
            if (label_H[i] == label_H[j]) == within
        ]
        return sum(found) / len(found) if found else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        mean, least = self.agreement or (None, None)
        return {
            "layer": self.layer,
            "cluster_of": list(self.cluster_of),
            "representatives": list(self.representatives),
            "similarity_within": self.mean(within=True),
            "similarity_between": self.mean(within=False),
            "agreement": mean,
            "agreement_least": least,
            "same_representatives": self.same_representatives,
            "similarity": self.similarity_HH.tolist(),
        }


def part_count(texts: int, parts: int | None) -> int:
    """Return the number of parts, by default 2 at most; raise `ConfigError` for more than texts."""
    count = min(PARTS, texts) if parts is None else parts
    if count > texts:
        raise ConfigError(f"parts must be at most the {texts} texts, got {count}")
    return count


def parts_of(texts: Sequence[Sums], parts: int | None) -> list[dict[int, Similarity]]:
    """Deal texts of the same layers out to disjoint parts (`part_count`); join each part's similarities."""
    count = part_count(len(texts), parts)
    return [joined(texts[first::count]) for first in range(count)]


def cluster_layers(parts: Sequence[Sums], clusters: int) -> list[LayerClusters]:
    """Cluster the KV heads of every layer, over all parts and over each part (SyncKV, 4.1 and B.1).

    Raises:
        ConfigError: A layer has fewer KV heads than N_r (`clusters`).
    """
    whole = joined(parts)
    for one in whole.values():
        check_count(clusters, len(one.total_HH))
    return [_layer(layer, whole[layer], parts, clusters) for layer in sorted(whole)]


def _layer(layer: int, whole: Similarity, parts: Sequence[Sums], clusters: int) -> LayerClusters:
    cluster_of, representatives = cluster(whole.mean_HH, clusters)
    found = [cluster(part[layer].mean_HH, clusters) for part in parts]
    shares = [pair_agreement(one, other) for (one, _), (other, _) in combinations(found, 2)]
    several = len(parts) > 1
    same = [set(chosen) == set(representatives) for _, chosen in found]
    return LayerClusters(
        layer=layer,
        similarity_HH=whole.mean_HH,
        cluster_of=cluster_of,
        representatives=representatives,
        agreement=(sum(shares) / len(shares), min(shares)) if several else None,
        same_representatives=sum(same) / len(same) if several else None,
    )


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
