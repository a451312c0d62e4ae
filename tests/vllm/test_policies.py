"""Policies that the plugin admits beside sfi: the same as under `sfi_core.generate`."""

import pytest

from tests.vllm.engines import (
    SELECTS,
    SMALL_BATCH,
    ask,
    assert_nothing_is_left,
    assert_same,
    engine,
    example_ids,
    reference,
)


@pytest.mark.parametrize("policy", ["codescan", "quest", "streaming-llm", "full-kv", "snapkv"])
def test_other_policies_give_the_same_as_generate(policy: str):
    prompts = [example_ids()[i * 40 : i * 40 + n] for i, n in enumerate([700, 33, 300, 64, 450])]
    with engine({**SELECTS, "policy": policy}, **SMALL_BATCH) as llm:
        assert_same(ask(llm, prompts), reference(prompts, 40, SELECTS, policy=policy))
        assert_nothing_is_left(llm)
