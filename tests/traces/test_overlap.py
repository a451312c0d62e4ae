"""Set measures on padded rows, against Python's sets."""

import random

import numpy as np
import pytest

from sfi_traces.overlap import Overlap


def rows(rng: random.Random, shape: tuple[int, ...], width: int) -> tuple[np.ndarray, list[set]]:
    index, sets = np.full((*shape, width), -1, np.int32), []
    for place in np.ndindex(shape):
        chosen = sorted(rng.sample(range(40), rng.randint(0, width)))
        index[place][: len(chosen)] = chosen
        sets.append(set(chosen))
    return index, sets


@pytest.mark.parametrize(("first_width", "second_width"), [(8, 8), (3, 20), (20, 1), (0, 4), (5, 0)])
def test_counts_are_those_of_python_sets(first_width, second_width):
    rng = random.Random(first_width)
    first, firsts = rows(rng, (4, 50), first_width)
    second, seconds = rows(rng, (4, 50), second_width)
    found = Overlap.of(first, second)
    pairs = list(zip(firsts, seconds, strict=True))
    assert found.both.shape == (4, 50)
    assert found.both.ravel().tolist() == [len(a & b) for a, b in pairs]
    assert found.first.ravel().tolist() == [len(a) for a in firsts]
    assert found.second.ravel().tolist() == [len(b) for b in seconds]
    smaller = [min(len(a), len(b)) for a, b in pairs]
    expected = [len(a & b) / n if n else np.nan for (a, b), n in zip(pairs, smaller, strict=True)]
    np.testing.assert_allclose(found.coefficient.ravel(), expected, rtol=1e-6)
    union = [len(a & b) / len(a | b) if a | b else np.nan for a, b in pairs]
    np.testing.assert_allclose(found.jaccard.ravel(), union, rtol=1e-6)
