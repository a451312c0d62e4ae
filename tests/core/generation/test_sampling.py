"""Sampling: transformers' own processors, in its order; broken logits are an error."""

import pytest
import torch
from transformers import GenerationConfig

from sfi_core.engine.picking import LEAST_ROOM, PAD
from sfi_core.errors import ConfigError, NumericsError
from sfi_core.generation.sampling import Sampler, processors
from sfi_core.settings.engine import Sampling

B, V, T = 3, 50, 6
RUNNING = [False] * B


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(V, (B, T))


def sampled(sampling: Sampling, logits: torch.Tensor, ids: torch.Tensor) -> list[int]:
    return Sampler(sampling, ids)(logits, RUNNING[: len(ids)])


SETTINGS = [
    {},
    {"repetition_penalty": 1.7},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"top_k": 4},
    {"top_p": 0.4},
    {"min_p": 0.2},
    {"temperature": 1.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processors_are_those_transformers_generates_with(settings: dict, ids: torch.Tensor, tiny_model):
    config = GenerationConfig(**{"top_k": 0, "do_sample": Sampling(**settings).do_sample, **settings})
    theirs = tiny_model._get_logits_processor(config, T)  # noqa: SLF001
    ours = processors(Sampling(**settings))
    assert [type(processor) for processor in ours] == [type(processor) for processor in theirs]
    logits = 3 * torch.randn(B, V)
    assert torch.equal(ours(ids, logits.clone()), theirs(ids, logits.clone()))


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("temperature", -1.0, "at least 0"),
        ("temperature", float("nan"), "at least 0 and finite"),
        ("top_p", 1.1, "in (0, 1]"),
        ("repetition_penalty", 0.0, "positive"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, rule: str):
    with pytest.raises(ConfigError) as caught:
        Sampling(**{name: value})
    assert str(caught.value) == f"{name} must be {rule}, got {value}"


def test_greedy_takes_the_most_likely_token(ids: torch.Tensor):
    """And ignores the other settings of sampling, as transformers does with do_sample=False."""
    logits = torch.randn(B, V)
    assert sampled(Sampling(), logits, ids) == logits.argmax(-1).tolist()
    settings = Sampling(temperature=0, top_k=2, top_p=0.1, min_p=0.5)
    assert sampled(settings, logits, ids) == logits.argmax(-1).tolist()


def test_sampling_repeats_with_the_seed(ids: torch.Tensor):
    logits, drawn = torch.randn(B, V), []
    for seed in (1, 1, 2):
        sampler = Sampler(Sampling(temperature=1.0), ids, seed=seed)
        drawn.append([sampler(logits, RUNNING) for _ in range(5)])
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


def test_a_request_that_takes_a_row_draws_on_and_the_others_too(ids: torch.Tensor):
    logits, sampling = torch.randn(B, V), Sampling(temperature=1.0)
    plain, mixed = Sampler(sampling, ids), Sampler(sampling, ids)
    expected = [plain(logits, RUNNING) for _ in range(4)]
    newcomer = mixed.alone(ids[:1], 9)
    alone = [newcomer(logits[1:2], [False])[0] for _ in range(5)]
    newcomer = mixed.alone(ids[:1], 9)
    drawn = [mixed(logits, RUNNING), mixed(logits, [False, True, False])]
    newcomer(logits[1:2], [False])
    mixed.seat(1, newcomer)
    drawn += [mixed(logits, RUNNING) for _ in range(2)]
    for step, row in enumerate(drawn):
        assert [row[0], row[2]] == [expected[step][0], expected[step][2]]
    assert [drawn[0][1], drawn[1][1]] == [expected[0][1], PAD]
    assert [drawn[2][1], drawn[3][1]] == alone[1:3]


@pytest.mark.parametrize("length", [2, T, 15])
def test_the_penalty_of_a_row_that_was_taken_sees_its_new_request_only(length: int):
    """Whether its prompt is shorter or longer than what is there."""
    logits = torch.zeros(2, V)
    logits[:, 7], logits[:, 8], logits[:, 9] = 3.0, 2.9, 2.8
    sampler = Sampler(Sampling(repetition_penalty=2.0), torch.full((2, T), 7))
    assert sampler(logits, [False, False]) == [8, 8]
    newcomer = sampler.alone(torch.full((1, length), 8), 2)
    assert newcomer(logits[:1], [False]) == [7]
    sampler.seat(0, newcomer)
    assert sampler(logits, [False, False]) == [9, 9]
    assert sampler.tokens.ids_BT.shape[1] == max(T, length) + 2
    assert sampler.tokens.ids_BT[0, : length + 2].tolist() == [*[8] * length, 7, 9]
    assert set(sampler.tokens.ids_BT[0, length + 2 :].tolist()) <= {8}


def test_a_finished_request_gets_padding(ids: torch.Tensor):
    logits = torch.randn(B, V)
    sampler = Sampler(Sampling(), ids)
    expected = logits.argmax(-1).tolist()
    expected[1] = PAD
    assert sampler(logits, [False, True, False]) == expected
    assert sampler.tokens is None, "nothing looks back at them"


def test_tokens_so_far_are_kept_in_room_that_seldom_moves(ids: torch.Tensor):
    sampler, expected, places = Sampler(Sampling(repetition_penalty=1.1), ids), ids, set()
    for step in range(3 * LEAST_ROOM):
        logits = torch.zeros(B, V).index_fill(1, torch.tensor([step % 40]), 9.0)
        picked = sampler(logits, [False, True, False])
        assert picked[1] == PAD
        column_B = torch.tensor([picked[0], ids[1, 0], picked[2]])  # an ended row gets none
        expected = torch.cat([expected, column_B[:, None]], 1)
        places.add(sampler.tokens.ids_BT.data_ptr())
    assert torch.equal(sampler.tokens.ids_BT, expected)
    assert len(places) == 3, "256, 512 and 1024 tokens"


@pytest.mark.parametrize(("temperature", "bad"), [(0, torch.nan), (1, torch.inf)])
def test_broken_logits_are_named_with_step_and_request(ids: torch.Tensor, bad: float, temperature: float):
    sampler = Sampler(Sampling(temperature=temperature, repetition_penalty=1.1), ids)
    logits = torch.randn(B, V)
    sampler(logits, RUNNING)
    logits[2, 5] = bad
    with pytest.raises(NumericsError) as caught:
        sampler(logits, RUNNING)
    assert str(caught.value) == ("logits must be finite, got NaN or infinity at step 1 in request 2")
    assert sampler.tokens.ids_BT.shape == (B, T + 1)


def test_a_temperature_that_leaves_the_range_of_float32_is_named(ids: torch.Tensor):
    logits = torch.randn(B, V)
    low = Sampler(Sampling(temperature=1e-36), ids)
    assert low(logits, RUNNING) == logits.argmax(-1).tolist()
    with pytest.raises(NumericsError, match=r"at step 0 in request 0; raise sampling\.temperature, 1e-40 leaves"):
        Sampler(Sampling(temperature=1e-40), ids)(logits, RUNNING)


@pytest.mark.parametrize("temperature", [0, 1])
def test_forbidden_tokens_are_never_drawn_and_logits_without_any_other_are_broken(ids, temperature):
    """Some models give -inf to tokens that they never say."""
    logits = torch.full((B, V), -torch.inf)
    logits[:, 11] = 0.0
    assert sampled(Sampling(temperature=temperature), logits, ids) == [11] * B
    logits[0] = -torch.inf
    with pytest.raises(NumericsError, match=r"at step 0 in request 0$"):
        sampled(Sampling(temperature=temperature), logits, ids)


@pytest.mark.parametrize(("temperature", "bad"), [(0, torch.nan), (1, torch.inf), (1, -torch.inf)])
def test_a_finished_request_may_hold_anything(ids: torch.Tensor, bad: float, temperature: float):
    logits = torch.randn(B, V)
    logits[1] = bad
    tokens = Sampler(Sampling(temperature=temperature), ids)(logits, [False, True, False])
    assert tokens[1] == PAD


def test_half_precision_logits_are_sampled_in_float32(ids: torch.Tensor):
    """A temperature of 0.01 would overflow float16."""
    logits = (600 * torch.randn(B, V)).half()
    expected = logits.argmax(-1).tolist()
    assert sampled(Sampling(temperature=0.001), logits, ids) == expected


def test_tokens_are_handed_on_before_they_are_read(ids: torch.Tensor):
    handed = []
    sampler = Sampler(Sampling(), ids)
    sampler.ahead = handed.append
    tokens = sampler(torch.randn(B, V), RUNNING)
    assert [tensor.tolist() for tensor in handed] == [tokens]
