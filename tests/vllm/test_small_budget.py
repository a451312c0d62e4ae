"""A budget that selects: tokens, slow steps and reads are those of `sfi_core.generate` over transformers."""

from collections.abc import Iterator

import pytest
from vllm import LLM

from tests.vllm.engines import (
    SELECTS,
    SMALL_BATCH,
    ask,
    assert_nothing_is_left,
    assert_same,
    engine,
    example_ids,
    ragged,
    reference,
)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine(SELECTS, **SMALL_BATCH) as made:
        yield made


def test_eleven_ragged_prompts(llm: LLM):
    prompts, limits = ragged()
    assert_same(ask(llm, prompts, max_tokens=limits), reference(prompts, limits, SELECTS))
    assert_nothing_is_left(llm)


def test_short_prompts_and_the_same_ones_at_once(llm: LLM):
    ids = example_ids()
    prompts = [ids[:n] for n in (1, 3, 32, 64, 65, 640, 640, 641)]
    assert_same(ask(llm, prompts), reference(prompts, 40, SELECTS))


def test_a_prompt_that_is_cached_gives_the_same_tokens(llm: LLM):
    """The Selector looks at the last query of the prompt alone here, which is computed anew."""
    prompt = example_ids()[100:800]
    first, second = (ask(llm, [prompt], max_tokens=60)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 672)
    assert_same([first, second], reference([prompt], 60, SELECTS) * 2)


@pytest.mark.parametrize("policy", ["codescan", "quest", "streaming-llm", "full-kv", "snapkv"])
def test_other_policies_give_the_same_as_generate(policy: str):
    prompts = [example_ids()[i * 40 : i * 40 + n] for i, n in enumerate([700, 33, 300, 64, 450])]
    with engine({**SELECTS, "policy": policy}, **SMALL_BATCH) as llm:
        assert_same(ask(llm, prompts), reference(prompts, 40, SELECTS, policy=policy))
        assert_nothing_is_left(llm)
