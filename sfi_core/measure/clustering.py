"""Similarity of a layer's KV heads, the overlap of their top-k sets (SyncKV, 4.1), and clusters of them (B.1)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import add
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from sfi_core.engine.batch_pass import PromptLayer
from sfi_core.errors import ConfigError, InputError
from sfi_core.generation.generate import read_prompt
from sfi_core.generation.prompts import encode
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.state.kv_store import KVStore
from sfi_kernels.dense_attention import window_logits
from sfi_kernels.top_k import top_k

Matrix = npt.NDArray[np.float64]
QUERIES = 128  # last queries of a text
PIECE = 16  # queries, or steps, computed at once; each takes a float for each head and cached token
STARTS, ROUNDS = 32, 100  # seeded starts of K-Means, and its most iterations
DIGITS, NEAR = 9, 1e-8  # of a distance: smaller differences may come from the order of a sum
Labels = tuple[int, ...]


def cut_texts(tokenizer: Any, texts: Sequence[str], length: int, top: int) -> list[list[int]]:
    """Cut texts into pieces of `length` tokens; drop a text's shorter rest, keep a shorter text.

    Paper gap: B.1 takes the first 1,000 tokens of each article. Raise `InputError` for a piece of at most `top` tokens.
    """
    pieces = []
    for row in encode(tokenizer, texts):
        whole = max(1, len(row) // length)
        pieces += [row[i * length : (i + 1) * length] for i in range(whole)]
    for number, piece in enumerate(pieces):
        if len(piece) <= top:
            raise InputError(f"texts must have more than {top} tokens, the top-k, got {len(piece)} in text {number}")
    return pieces


@torch.no_grad()
def text_supports(
    model: Any, ids: Sequence[int], top: int, engine: EngineOptions = DEFAULTS
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a text densely, and yield the positions that its last queries attend to most.

    Each query stands for a decoding step that writes the text. Paper gap: "within a local window" (B.1,
    step 2) is read as the last 128 queries, each of which sees every token before it.

    Yield each full-attention layer, with [N, H, K] int32: for each query and KV head the k positions of largest weight,
    ascending. A KV head's weight is the largest of its query heads' (B.1, GQA). Raise `SfiError` as `read_prompt`.
    """
    queries = min(QUERIES, len(ids) - top)
    read = read_prompt(model, None, [ids], capacity=len(ids), window=queries, engine=engine)
    for layer, prompt in read.layers.items():
        yield layer, _layer_supports(read.store, layer, prompt, len(ids), top)


def _layer_supports(store: KVStore, layer: int, prompt: PromptLayer, length: int, top: int) -> torch.Tensor:
    supports, query_BHGTD = [], prompt.query_BHGTD
    W = query_BHGTD.shape[3]
    for first in range(0, W, PIECE):
        last = min(first + PIECE, W)
        seen = length - (W - last)
        logits_1HGWT = window_logits.on(store.backend)(
            query_BHGTD[:, :, :, first:last].contiguous(), store.pages(layer).key_PHND, store.block_table_BP,
            torch.tensor([seen], dtype=torch.int32, device=query_BHGTD.device), scale=prompt.options["scale"],
            soft_cap=prompt.options["soft_cap"], longest=seen,
        )  # fmt: skip
        weight_WHT = pooled_weight(logits_1HGWT[0], prompt.options["sink_HG"])
        supports.append(top_k.on(store.backend)(weight_WHT, top))
    return torch.cat(supports)


def pooled_weight(logits_HGWT: torch.Tensor, sink_HG: torch.Tensor | None = None) -> torch.Tensor:
    """Pool the attention weights of a KV head's query heads by their maximum (SyncKV, B.1, GQA).

    `logits_HGWT` are of W queries, -inf at masked positions; learned sink logits `sink_HG` take their share of the
    softmax. Return log weights, [W, H, T] float32; -inf at masked positions, which `top_k` never picks.
    """
    log_sum_HGW = logits_HGWT.logsumexp(-1)
    if sink_HG is not None:
        log_sum_HGW = torch.logaddexp(log_sum_HGW, sink_HG.float()[:, :, None])
    # the logarithm keeps the order of the weights, and small weights do not become 0
    return (logits_HGWT - log_sum_HGW[..., None]).amax(1).transpose(0, 1).contiguous()


def overlap(index_NHK: torch.Tensor) -> torch.Tensor:
    """Return the overlap coefficient of every two KV heads (SyncKV, Eq. 1), [N, H, H] float64; 0 for an empty set.

    `index_NHK` has for N steps the attended positions of each KV head, padded with -1.
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

    def __add__(self, other: Self) -> Self:
        """Join the steps of both."""
        return type(self)(self.total_HH + other.total_HH, self.steps + other.steps)

    @property
    def mean_HH(self) -> Matrix:
        """The similarity S of every two KV heads: the mean over steps and texts (SyncKV, Eq. 2)."""
        return self.total_HH / self.steps


Sums = Mapping[int, Similarity]  # by layer


def joined(parts: Sequence[Sums]) -> dict[int, Similarity]:
    """Add the similarities of the same layers up; all steps of all texts count the same."""
    return {layer: reduce(add, (part[layer] for part in parts)) for layer in parts[0]}


def check_count(clusters: int, heads: int) -> None:
    """Raise `ConfigError` for more clusters than KV heads."""
    if clusters > heads:
        raise ConfigError(f"representatives must be at most the layer's {heads} KV heads, got {clusters}")


def distance(similarity_HH: Matrix) -> Matrix:
    """Turn the similarity of heads into distances, max(S) - S (SyncKV, B.1, step 3)."""
    far_HH: Matrix = similarity_HH.max() - similarity_HH
    return far_HH


def cluster(similarity_HH: Matrix, clusters: int, seed: int = 0) -> tuple[Labels, Labels]:
    """Cluster KV heads by K-Means over rows of the distance matrix; choose representatives (SyncKV, B.1, 3-4).

    Paper gap: how K-Means starts is not given. Ours takes the best of 32 seeded k-means++ starts, the one with the
    least sum of squared distances to the centroids. If there are fewer different rows than clusters, heads of the
    largest cluster fill the empty clusters.

    Return each head's cluster, numbered by lowest heads, and each cluster's representative: the head nearest to the
    centroid, the lower of equally near ones. Raise `ConfigError` for more clusters than heads.
    """
    check_count(clusters, len(similarity_HH))
    row_HX = distance(similarity_HH).round(DIGITS)
    labels = _filled(_k_means(row_HX, clusters, seed), clusters).tolist()
    order = list(dict.fromkeys(labels))
    label_H = np.array([order.index(label) for label in labels])
    representatives = []
    for number in range(clusters):
        members = np.flatnonzero(label_H == number)
        far = np.linalg.norm(row_HX[members] - row_HX[members].mean(0), axis=1)
        representatives.append(int(members[np.flatnonzero(far <= far.min() + NEAR)[0]]))
    return tuple(label_H.tolist()), tuple(representatives)


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
        distances = float(((row_HX - center_CX[label_H]) ** 2).sum())
        if distances < least - NEAR:
            best, least = label_H.astype(np.int64), distances
    return best


def _filled(label_H: npt.NDArray[np.int64], clusters: int) -> npt.NDArray[np.int64]:
    # move the last head of the largest cluster into an empty cluster
    label_H = label_H.copy()
    for number in range(clusters):
        if not (label_H == number).any():
            largest = int(np.bincount(label_H).argmax())
            label_H[np.flatnonzero(label_H == largest)[-1]] = number
    return label_H


def cluster_layers(texts: Sequence[Sums], clusters: int) -> list[dict[str, Any]]:
    """Cluster the KV heads of every layer over texts of the same layers (SyncKV, 4.1 and B.1); return a row for each.

    Similarities are means over pairs of heads, None without a pair. Raise `ConfigError` as `cluster`.
    """
    rows = []
    for layer, whole in sorted(joined(texts).items()):
        label_H, representatives = cluster(whole.mean_HH, clusters)
        alike: dict[bool, list[float]] = {True: [], False: []}  # by whether two heads are of one cluster
        for i, j in combinations(range(len(label_H)), 2):
            alike[label_H[i] == label_H[j]].append(float(whole.mean_HH[i, j]))
        within, between = (sum(pairs) / len(pairs) if pairs else None for pairs in alike.values())
        rows.append(
            {
                "layer": layer,
                "cluster_of": list(label_H),
                "representatives": list(representatives),
                "similarity_within": within,
                "similarity_between": between,
                "similarity": whole.mean_HH.tolist(),
            }
        )
    return rows
