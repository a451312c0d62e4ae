"""Sampling's noise: known integers, a distribution, and no tie between one place's numbers and another's."""

import math
from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chi2

from sfi_core.engine.picking import gumbel, noise_key, random_bits

GOLDEN, WORD = 0x9E3779B97F4A7C15, 2**64


def split_mix(seed: int, count: int) -> list[int]:
    """SplitMix64 as published, with its running state, in Python's integers."""
    numbers, state = [], seed
    for _ in range(count):
        state = (state + GOLDEN) % WORD
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % WORD
        numbers.append(mixed ^ (mixed >> 31))
    return numbers


def bits(keys: Sequence[int], size: int) -> list[list[int]]:
    found = random_bits(torch.tensor(keys), size).tolist()
    return [[number % WORD for number in row] for row in found]


def test_bits_are_those_of_split_mix_64():
    """The first five of seed 1234567 are those that the generator's ports are checked by."""
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip
    keys = [1234567, 0, -1, -(2**63), 2**63 - 1]
    assert bits(keys, 5)[0] == published
    assert bits(keys, 700) == [split_mix(key % WORD, 700) for key in keys]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_the_bits_of_the_cpu():
    keys = torch.tensor([noise_key(1, 0, index) for index in range(9)])
    assert torch.equal(random_bits(keys.cuda(), 5000).cpu(), random_bits(keys, 5000))
    torch.testing.assert_close(gumbel(keys.cuda(), 5000).cpu(), gumbel(keys, 5000), rtol=1e-13, atol=1e-13)


def test_noise_is_the_transform_of_52_bits():
    expected = [-math.log(-math.log(((number >> 12) + 0.5) / 2**52)) for number in split_mix(77, 400)]
    assert gumbel(torch.tensor([77]), 400)[0].tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("number", [0, -1], ids=["least", "largest"])
def test_the_ends_of_the_bits_give_finite_noise(monkeypatch: pytest.MonkeyPatch, number: int):
    monkeypatch.setattr(
        "sfi_core.engine.picking.random_bits", lambda key_X, size: torch.full((len(key_X), size), number)
    )
    assert gumbel(torch.tensor([0]), 1).isfinite().all()


def test_keys_tell_seed_request_and_index_apart():
    numbers = (-1, 0, 1, 2, 11, 2**63)
    keys = {noise_key(a, b, c) for a in numbers for b in numbers for c in numbers}
    assert len(keys) == len(numbers) ** 3
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_draws_have_the_probabilities_of_softmax():
    """Chi-square over 20,000 indices; a true distribution fails in one set of numbers of a million."""
    score_V, count = torch.linspace(-3, 2, 40, dtype=torch.float64), 20_000
    keys = torch.tensor([noise_key(5, 3, index) for index in range(count)])
    drawn = (score_V + gumbel(keys, 40)).argmax(-1).bincount(minlength=40)
    expected = count * score_V.softmax(-1)
    assert ((drawn - expected) ** 2 / expected).sum() < chi2.ppf(1 - 1e-6, 39)


@pytest.mark.parametrize("other", [(9, 4, 1), (9, 5, 0), (8, 4, 0)], ids=["index", "request", "seed"])
@pytest.mark.parametrize("shift", [0, 1])
def test_neighbouring_places_have_independent_noise(other: tuple[int, int, int], shift: int):
    """Also one token id apart: keys that were a counter apart would share their numbers."""
    keys = torch.tensor([noise_key(9, 4, 0), noise_key(*other)])
    noise_2V = gumbel(keys, 100_000)
    pair = torch.stack([noise_2V[0, shift:], noise_2V[1, : 100_000 - shift]])
    assert pair.corrcoef()[0, 1].abs() < 0.02  # 6 standard deviations
