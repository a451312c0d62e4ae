"""Similarity and clusters of KV heads, against transcriptions of SyncKV's Eqs. 1, 2 and B.1."""

from itertools import product

import numpy as np
import pytest
import torch

from sfi_core.errors import ConfigError
from sfi_core.measure import clustering
from sfi_core.measure.clustering import Similarity, cluster, cluster_layers, distance, joined, overlap
from tests.core.conftest import tiny_qwen3
from tests.covering import first

pytest.importorskip("scipy")

N, H, K, T = 37, 5, 9, 30


def random_sets(seed: int, steps: int = N, heads: int = H) -> list[list[set[int]]]:
    rng = np.random.default_rng(seed)
    return [[set(rng.permutation(T)[: rng.integers(1, K + 1)].tolist()) for _ in range(heads)] for _ in range(steps)]


def as_index(sets: list[list[set[int]]]) -> torch.Tensor:
    rows = [[[*sorted(positions), *[-1] * (K - len(positions))] for positions in step] for step in sets]
    return torch.tensor(rows, dtype=torch.int32)


def coefficient(first: set[int], second: set[int]) -> float:
    return len(first & second) / min(len(first), len(second))


def similarity(sets: list[list[set[int]]], i: int, j: int) -> float:
    return sum(coefficient(step[i], step[j]) for step in sets) / len(sets)


def random_similarity(seed: int, heads: int) -> np.ndarray:
    return Similarity.of(as_index(random_sets(seed, 3, heads))).mean_HH


def test_overlap_is_the_share_of_the_smaller_set():
    """SyncKV, Eq. 1."""
    sets = random_sets(0)
    overlap_NHH = overlap(as_index(sets))
    for n, i, j in product(range(N), range(H), range(H)):
        assert overlap_NHH[n, i, j] == pytest.approx(coefficient(sets[n][i], sets[n][j]), abs=1e-6)


def test_similarity_is_the_mean_over_steps_and_texts():
    """SyncKV, Eq. 2, over two texts of different lengths."""
    first, second = random_sets(1), random_sets(2, steps=8)
    whole = joined([{0: Similarity.of(as_index(sets))} for sets in (first, second)])[0]
    assert whole.steps == N + 8
    for i, j in product(range(H), range(H)):
        assert whole.mean_HH[i, j] == pytest.approx(similarity(first + second, i, j))


def blocks(seed: int, labels: list[int]) -> np.ndarray:
    """A noisy similarity in which heads of one label are more alike."""
    noise = np.random.default_rng(seed).uniform(-0.08, 0.08, (len(labels), len(labels)))
    S = np.where(np.equal.outer(labels, labels), 0.7, 0.4) + noise + noise.T
    np.fill_diagonal(S, 1.0)
    return S


def centroids(rows: list[list[float]], labels: tuple[int, ...]) -> list[list[float]]:
    means = []
    for number in range(max(labels) + 1):
        members = [row for row, label in zip(rows, labels, strict=True) if label == number]
        means.append([sum(column) / len(members) for column in zip(*members, strict=True)])
    return means


def square(first: list[float], second: list[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(first, second, strict=True))


def squares(rows: list[list[float]], labels: tuple[int, ...]) -> float:
    center = centroids(rows, labels)
    return sum(square(row, center[label]) for row, label in zip(rows, labels, strict=True))


@pytest.mark.parametrize("labels", [[0] * 6, [0, 1, 1, 0, 0, 1], [0, 1, 2, 2, 1, 0]])
@pytest.mark.parametrize("seed", range(3))
def test_clusters_are_the_best_partition_of_the_distances(seed: int, labels: list[int]):
    """SyncKV, B.1, step 3, against every partition of six heads."""
    S, clusters = blocks(seed, labels), len(set(labels))
    D = [[S.max() - S[i, j] for j in range(6)] for i in range(6)]
    np.testing.assert_allclose(distance(S), D)
    every = product(range(clusters), repeat=6)
    best = min(squares(D, partition) for partition in every if len(set(partition)) == clusters)
    cluster_of, _ = cluster(S, clusters)
    assert squares(D, cluster_of) == pytest.approx(best)


@pytest.mark.parametrize("clusters", first([2, 3, 4]))
def test_heads_are_with_the_nearest_centroid_and_the_nearest_head_represents_them(clusters: int):
    """SyncKV, B.1, step 4, even where heads have no clear groups; of two as near the lower one."""
    for seed in range(6):
        S = random_similarity(seed, heads=7)
        D = (S.max() - S).tolist()
        cluster_of, representatives = cluster(S, clusters)
        far = [[square(row, centroid) for centroid in centroids(D, cluster_of)] for row in D]
        assert {len(distances) for distances in far} == {clusters}
        for distances, label in zip(far, cluster_of, strict=True):
            assert distances[label] <= min(distances) + 1e-9
        for label, chosen in enumerate(representatives):
            members = [head for head in range(7) if cluster_of[head] == label]
            least = min(far[head][label] for head in members)
            assert chosen == next(head for head in members if far[head][label] <= least + 1e-9)


def test_more_representatives_than_heads_are_refused():
    message = "representatives must be at most the layer's 5 KV heads, got 6"
    with pytest.raises(ConfigError, match=message):
        cluster(random_similarity(0, H), 6)
    with pytest.raises(ConfigError, match=message):
        cluster_layers([{0: Similarity.of(as_index(random_sets(0)))}], 6)


def test_a_mean_is_taken_over_pairs_within_and_between_clusters():
    S = np.array([[1.0, 0.9, 0.2], [0.9, 1.0, 0.4], [0.2, 0.4, 1.0]])
    (layer,) = cluster_layers([{7: Similarity(S * 10, 10)}], 2)
    assert (layer["layer"], layer["cluster_of"]) == (7, [0, 0, 1])
    assert layer["similarity_within"] == pytest.approx(0.9)
    assert layer["similarity_between"] == pytest.approx(0.3)


def eager_weights(model, ids: list[int]) -> list[torch.Tensor]:
    # transformers' own attention weights, pooled by the maximum over a KV head's two query heads (B.1, GQA)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor([ids]), output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return [torch.maximum(weight_BHTT[0, 0::2], weight_BHTT[0, 1::2]) for weight_BHTT in weights]


def test_a_text_s_sets_are_the_heaviest_positions_of_its_last_queries():
    model, top = tiny_qwen3(), 6
    ids = torch.randint(0, 96, (150,)).tolist()
    expected = eager_weights(model, ids)
    supports = dict(clustering.text_supports(model, ids, top))
    assert list(supports) == [0, 1]
    for layer, index_NHK in supports.items():
        assert index_NHK.shape == (clustering.QUERIES, 2, top)
        for n, h in product(range(clustering.QUERIES), range(2)):
            query = len(ids) - clustering.QUERIES + n
            weight = expected[layer][h, query, : query + 1].tolist()
            chosen = index_NHK[n, h].tolist()
            rest = [weight[place] for place in range(query + 1) if place not in chosen]
            assert len(set(chosen)) == top
            assert min(weight[place] for place in chosen) >= max(rest) - 1e-5


def test_a_learned_sink_takes_its_share_before_heads_are_pooled():
    logits = torch.randn(2, 3, 4, 7)
    sink = torch.randn(2, 3)
    joint = torch.cat([logits, sink[:, :, None, None].expand(2, 3, 4, 1)], -1).softmax(-1)
    expected = joint[..., :-1].amax(1).transpose(0, 1)
    torch.testing.assert_close(clustering.pooled_weight(logits, sink).exp(), expected)
