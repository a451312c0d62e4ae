"""Similarity of a layer's KV heads, the overlap of their top-k sets (SyncKV, Section 4.1), and clusters of alike heads.

K-Means clusters the rows of the distance matrix; a head represents each cluster (SyncKV, B.1).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from sfi_core.errors import ConfigError, not_installed

Matrix = npt.NDArray[np.float64]
PIECE = 16  # steps compared at once; a step takes a float for each head and cached token
STARTS, ROUNDS = 32, 100  # seeded starts of K-Means, and its most iterations
DIGITS, NEAR = 9, 1e-8  # of a distance: smaller differences may come from the order of a sum
Labels = tuple[int, ...]


def overlap(index_NHK: torch.Tensor) -> torch.Tensor:
    """Return the overlap coefficient of every two KV heads (SyncKV, Eq. 1).

    Args:
        index_NHK: For N steps the attended positions of each KV head, integers, padded with -1.

    Returns:
        [N, H, H] float64 in [0, 1]: the shared positions over those of the smaller set; 0 for an empty set.
    """
    N, H, _ = index_NHK.shape
    T = int(index_NHK.max()) + 1 if index_NHK.numel() else 0
    # padding goes to an extra column, which is cut off
    member_NHT = torch.zeros(N, H, T + 1, device=index_NHK.device)
    place_NHK = torch.where(index_NHK < 0, T, index_NHK).long()
    member_NHT = member_NHT.scatter_(2, place_NHK, 1.0)[..., :T]
    size_NH = member_NHT.sum(2)
    shared_NHH = member_NHT @ member_NHT.mT
    smaller_NHH = torch.minimum(size_NH[:, :, None], size_NH[:, None, :])
    return shared_NHH.double() / smaller_NHH.clamp_min(1).double()


@dataclass(frozen=True, slots=True)
class Similarity:
    """A layer's overlap coefficients, summed over `steps` steps."""

    total_HH: Matrix
    steps: int

    @classmethod
    def of(cls, index_NHK: torch.Tensor) -> Self:
        """Sum the overlaps of N steps; see `overlap`."""
        N, H, _ = index_NHK.shape
        total_HH = torch.zeros(H, H, dtype=torch.float64, device=index_NHK.device)
        for first in range(0, N, PIECE):
            total_HH += overlap(index_NHK[first : first + PIECE]).sum(0)
        return cls(total_HH.cpu().numpy(), N)

    @property
    def mean_HH(self) -> Matrix:
        """The similarity S of every two KV heads: the mean over steps and texts (SyncKV, Eq. 2)."""
        return self.total_HH / self.steps


def joined(parts: Iterable[Mapping[int, Similarity]]) -> dict[int, Similarity]:
    """Add similarities up by layer; all steps of all texts count the same."""
    found: dict[int, Similarity] = {}
    for part in parts:
        for layer, one in part.items():
            known = found.get(layer)
            found[layer] = one if known is None else Similarity(known.total_HH + one.total_HH, known.steps + one.steps)
    return found


def check_scipy() -> None:
    """Raise `BackendError` if SciPy is not installed."""
    if find_spec("scipy") is None:
        raise not_installed("head clusters need", "scipy", "tune")


def check_count(clusters: int, heads: int) -> None:
    """Raise `ConfigError` for more clusters than KV heads."""
    if clusters > heads:
        raise ConfigError(f"representatives must be at most the layer's {heads} KV heads, got {clusters}")


def distance(similarity_HH: Matrix) -> Matrix:
    """Turn the similarity of heads into distances, max(S) - S (SyncKV, B.1, step 3)."""
    far_HH: Matrix = similarity_HH.max() - similarity_HH
    return far_HH


def cluster(similarity_HH: Matrix, clusters: int, seed: int = 0) -> tuple[Labels, Labels]:
    """Cluster the KV heads of a layer, and choose a representative for each cluster (SyncKV, B.1, 3-4).

    K-Means clusters the rows of the distance matrix; a head's row has its distances to all heads.

    Paper gap: how K-Means starts is not given. Ours takes the best of 32 seeded k-means++ starts, the one
    with the least sum of squared distances to the centroids. If there are fewer different rows than clusters,
    heads of the largest cluster fill the empty clusters.

    Returns:
        Each head's cluster, and each cluster's representative: the head nearest to the centroid, the lower of
        equally near heads. Clusters are numbered by their lowest heads.

    Raises:
        ConfigError: More clusters than heads.
    """
    check_count(clusters, len(similarity_HH))
    row_HX = distance(similarity_HH).round(DIGITS)
    found = _filled(_k_means(row_HX, clusters, seed), clusters).tolist()
    order = list(dict.fromkeys(found))
    label_H = np.array([order.index(label) for label in found])
    return tuple(label_H.tolist()), tuple(
        _representative(row_HX, np.flatnonzero(label_H == number)) for number in range(clusters)
    )


def _k_means(row_HX: Matrix, clusters: int, seed: int) -> npt.NDArray[np.int64]:
    from scipy.cluster.vq import ClusterError, kmeans2  # noqa: PLC0415 - an extra

    different, label_H = np.unique(row_HX, axis=0, return_inverse=True)
    if clusters >= len(different):  # k-means++ would draw a row twice
        return label_H.reshape(-1)
    best, least = np.zeros(len(row_HX), np.int64), np.inf
    for start in range(STARTS):
        try:
            center_CX, label_H = kmeans2(
                row_HX, clusters, iter=ROUNDS, minit="++", missing="raise", rng=np.random.default_rng([seed, start])
            )
        except ClusterError:  # a cluster lost its last head: the next start draws others
            continue
        spread = float(((row_HX - center_CX[label_H]) ** 2).sum())
        if spread < least - NEAR:
            best, least = label_H.astype(np.int64), spread
    return best


def _filled(label_H: npt.NDArray[np.int64], clusters: int) -> npt.NDArray[np.int64]:
    # move the last head of the largest cluster into an empty cluster
    found = label_H.copy()
    for number in range(clusters):
        if not (found == number).any():
            largest = int(np.bincount(found).argmax())
            found[np.flatnonzero(found == largest)[-1]] = number
    return found


def _representative(row_HX: Matrix, members: npt.NDArray[np.int64]) -> int:
    far = np.linalg.norm(row_HX[members] - row_HX[members].mean(0), axis=1)
    return int(members[np.flatnonzero(far <= far.min() + NEAR)[0]])
