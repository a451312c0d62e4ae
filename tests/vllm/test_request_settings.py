"""Settings of one request, side by side in one batch, and prefix caches that keep them apart."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from tests.vllm.engines import (
    GREEDY,
    SELECTS,
    SMALL_BATCH,
    ask,
    assert_nothing_is_left,
    assert_same,
    engine,
    example_ids,
    reference,
    tokens,
    told,
)

PROMPT = slice(100, 900)


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with engine(**SMALL_BATCH) as llm:
        return tokens(llm, [example_ids()[PROMPT]], max_tokens=60)[0]


@pytest.fixture(scope="module")
def llm(plain: list[int]) -> Iterator[LLM]:
    with engine(SELECTS, **SMALL_BATCH) as made:
        yield made


def ask_each(llm: LLM, settings: list[dict[str, Any] | None]) -> list[Any]:
    parameters = [SamplingParams(**GREEDY, max_tokens=60, extra_args=own) for own in settings]
    prompt = {"prompt_token_ids": example_ids()[PROMPT]}
    return llm.generate([prompt] * len(settings), parameters, use_tqdm=False)


def test_requests_of_one_batch_have_settings_of_their_own(llm: LLM, plain: list[int]):
    given = [None, {"sfi.t_max": 3, "sfi.min_gap": 0}, {"sfi.enabled": 0}, {"sfi.budget": 5}]
    outputs = ask_each(llm, given)
    wanted = [SELECTS, SELECTS | {"t_max": 3, "min_gap": 0}]
    assert_same(outputs[:2], [reference([example_ids()[PROMPT]], 60, own)[0] for own in wanted])
    for output in outputs[2:]:
        assert list(output.outputs[0].token_ids) == plain
        assert told(output)["read_ratio"] == 1
        assert told(output)["dense_steps"] == 59
    assert "error" not in told(outputs[2])
    assert told(outputs[3])["error"].startswith("sfi.budget is no setting of one request")
    assert list(outputs[0].outputs[0].token_ids) != plain
    assert_nothing_is_left(llm)


def test_a_request_that_is_always_slow_reads_everything(llm: LLM, plain: list[int]):
    output = ask_each(llm, [{"sfi.trigger_policy": "always"}])[0]
    assert list(output.outputs[0].token_ids) == plain
    assert told(output)["dense_steps"] == 0
    assert told(output)["reasons"]["always"] == 58
    assert told(output)["read_ratio"] == 1


@pytest.mark.parametrize("salt", [None, "a client's"])
def test_a_dense_request_reads_no_keys_of_fast_steps(salt: str | None):
    """Without a salt of their own, the second turn of a chat would begin with what fast steps had made."""
    with engine(SELECTS, **SMALL_BATCH) as llm:
        first = example_ids()[PROMPT]
        answer = tokens(llm, [first], max_tokens=60, salt=salt)[0]
        turn = [first + answer + example_ids()[900:940]]
        dense = ask(llm, turn, max_tokens=5, extra_args={"sfi.enabled": 0}, salt=salt)[0]
        assert dense.num_cached_tokens == 0
        again = ask(llm, turn, max_tokens=5, salt=salt)[0]
        assert again.num_cached_tokens >= 832
