"""Tokens of several positions of a pass: the tokens, one by one, that steps would pick."""

import math

import pytest
import torch
from scipy.stats import chi2

from sfi_core.engine import picking as picker_module
from sfi_core.engine.picking import LEAST_ROOM, TokensSoFar, gumbel, noise_key, random_bits
from sfi_core.errors import NumericsError
from sfi_core.generation.sampling import Sampler
from sfi_core.settings.engine import Sampling

B, V, T, STEPS = 3, 50, 6, 7
RUNNING = [False] * B
SETTINGS = [
    Sampling(),
    Sampling(repetition_penalty=3.0),
    Sampling(temperature=1.0),
    Sampling(temperature=1.6),
    Sampling(top_k=4),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=1.0, repetition_penalty=3.0),
    Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.4),
]


@pytest.fixture
def logits_SBV() -> torch.Tensor:
    """Much the same at every step: a token comes again, unless a penalty keeps it away."""
    return 3 * torch.randn(B, V) + torch.randn(STEPS, B, V)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(V, (B, T))


def stepped(sampling: Sampling, ids: torch.Tensor, logits_SBV: torch.Tensor) -> list[list[int]]:
    sampler = Sampler(sampling, ids, seed=4)
    steps = [sampler(logits_BV, RUNNING) for logits_BV in logits_SBV]
    return [list(row) for row in zip(*steps, strict=True)]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_positions_of_a_pass_get_the_tokens_of_steps(sampling: Sampling, ids: torch.Tensor, logits_SBV: torch.Tensor):
    """Ragged: rows give 3, 1 and no token, then 2, 4 and 5; the positions come in any order."""
    expected = stepped(sampling, ids, logits_SBV)
    sampler, known = Sampler(sampling, ids, seed=4), [0] * B
    for counts in ((3, 1, 0), (2, 4, 5)):
        places = [(row, offset) for row in (2, 0, 1) for offset in reversed(range(counts[row]))]
        picks = sampler.draw(
            torch.stack([logits_SBV[known[row] + offset, row] for row, offset in places]),
            [row for row, _ in places],
            [offset for _, offset in places],
            [expected[row][known[row] : known[row] + offset] for row, offset in places],
        )
        picked = sampler.read(picks)
        assert picked == [expected[row][known[row] + offset] for row, offset in places]
        sampler.advance([expected[row][known[row] : known[row] + counts[row]] for row in range(B)])
        known = [have + count for have, count in zip(known, counts, strict=True)]
    assert [row.step for row in sampler.rows] == [5, 5, 5]
    logits_BV = logits_SBV[5]
    assert sampler(logits_BV, RUNNING) == [row[5] for row in expected]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_the_batch_and_its_pieces_change_no_token(sampling, ids, logits_SBV, monkeypatch):
    expected = stepped(sampling, ids, logits_SBV)
    for row in range(B):
        alone = Sampler(sampling, ids[row : row + 1], seed=4, first=row)
        tokens = [alone(logits_BV[row : row + 1], [False])[0] for logits_BV in logits_SBV]
        assert tokens == expected[row]
    for name in ("CPU_PIECE", "PIECE"):
        monkeypatch.setattr(picker_module, name, 2 * V)
    assert stepped(sampling, ids, logits_SBV) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_picks_the_tokens_of_the_cpu(ids: torch.Tensor, logits_SBV: torch.Tensor):
    sampling = Sampling(temperature=1.6, top_k=20, repetition_penalty=1.4)
    expected = stepped(sampling, ids, logits_SBV)
    assert stepped(sampling, ids.cuda(), logits_SBV.cuda()) == expected
    sampler = Sampler(sampling, ids.cuda(), seed=4)
    tail = [expected[1][:offset] for offset in range(STEPS)]
    picked = sampler.read(sampler.draw(logits_SBV[:, 1].cuda(), [1] * STEPS, range(STEPS), tail))
    assert picked == expected[1]


def test_picking_notes_nothing(ids: torch.Tensor, logits_SBV: torch.Tensor):
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5)
    sampler = Sampler(sampling, ids, seed=4)
    sampler.read(sampler.draw(logits_SBV[:, 1], [1] * STEPS, range(STEPS), [[3] * x for x in range(STEPS)]))
    expected = [row[0] for row in stepped(sampling, ids, logits_SBV)]
    assert sampler(logits_SBV[0], RUNNING) == expected


@pytest.mark.parametrize(("temperature", "bad"), [(0, torch.nan), (1, torch.inf)])
def test_a_broken_position_is_named_with_its_own_step(ids: torch.Tensor, bad: float, temperature: float):
    sampler = Sampler(Sampling(temperature=temperature), ids, first=10)
    sampler.advance([[1, 2], [], [3]])
    logits_XV = torch.randn(2, V)
    logits_XV[1, 5] = bad
    with pytest.raises(NumericsError) as caught:
        sampler.read(sampler.draw(logits_XV, [1, 2], [0, 3], [(), (1, 1, 1)]))
    assert str(caught.value) == ("logits must be finite, got NaN or infinity at step 4 in request 12")


def test_tokens_so_far_hold_rows_that_gain_different_numbers(ids: torch.Tensor):
    """Whatever is repeated where a row has fewer is a token that the row has."""
    tokens, expected = TokensSoFar(ids), ids.tolist()
    for step in range(LEAST_ROOM):
        new = [[row * 100 + step] * ((step + row) % B) for row in range(B)]
        tokens.add(new)
        expected = [have + more for have, more in zip(expected, new, strict=True)]
    assert tokens.length_B == [len(row) for row in expected]
    padded = tokens.ids_BT.tolist()
    for ours, row in zip(padded, expected, strict=True):
        assert ours[: len(row)] == row
        assert set(ours[len(row) :]) <= {row[0]}
        assert len(ours) == max(map(len, expected))


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 2], [2, 0, 0]], ids=str)
def test_what_precedes_a_position_is_its_row_and_its_tail(ids: torch.Tensor, rows: list[int]):
    tokens, tail = TokensSoFar(ids), [[], [60], [61, 62]][: len(rows)]
    seen = [set(row_ids) for row_ids in tokens.before(rows, tail).tolist()]
    assert seen == [{*ids[row].tolist(), *more} for row, more in zip(rows, tail, strict=True)]


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


def bits(keys, size: int) -> list[list[int]]:
    rows = random_bits(torch.tensor(keys), size).tolist()
    return [[number % WORD for number in row] for row in rows]


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
