"""Hybrids: full attention, which sfi manages, beside states that vLLM keeps in KV-cache groups of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import LLM

from sfi_core.hosts.vllm.room import engine_of_process
from tests.architectures import BY_LABEL
from tests.vllm.engines import SMALL_BATCH, ask, assert_nothing_is_left, assert_same, engine, reference, tokens, told
from tests.vllm.test_models import HOLDS_ALL, SELECTS, prompts

WIDE = {"hidden_size": 128, "head_dim": 32}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128}
MODELS = {"granite-4": MAMBA2, "falcon-h1": MAMBA2}
GROUPS = {"granite-4": ([0, 2], [1, 3])}


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(folder), "skip_tokenizer_init": True, "max_model_len": 512, **SMALL_BATCH,
        "max_num_batched_tokens": 200, "enable_prefix_caching": False, **more,
    }  # fmt: skip


@pytest.mark.parametrize("label", MODELS)
def test_tokens_are_vllm_s_or_generate_s(label: str, tmp_path: Path):
    one = BY_LABEL[label]
    model = replace(one, settings={**one.settings, **WIDE, **MODELS[label]}).build()
    model.save_pretrained(tmp_path)
    with engine(**options(tmp_path)) as llm:
        plain = tokens(llm, prompts(), detokenize=False)
    with engine(HOLDS_ALL, **options(tmp_path)) as llm:
        outputs = ask(llm, prompts(), detokenize=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == plain
        assert all(told(o)["fast_steps"] > told(o)["slow_steps"] for o in outputs)
        assert_nothing_is_left(llm)
    with engine(SELECTS, **options(tmp_path)) as llm:
        outputs = ask(llm, prompts(), detokenize=False)
        settings = SELECTS | {"trigger_token_ids": tuple(SELECTS["trigger_token_ids"])}
        assert_same(outputs, reference(prompts(), 40, settings, model=model))
        assert [list(o.outputs[0].token_ids) for o in outputs] != plain  # it selects
