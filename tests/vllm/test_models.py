"""Other architectures as tiny random models: sliding groups, soft caps, learned sinks, experts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.architectures import REFUSED, WORKS, Architecture
from tests.vllm.engines import SMALL_BATCH, ask, assert_nothing_is_left, assert_same, engine, reference, tokens, told

NAMES = ["Llama", "Qwen2", "Gemma 2", "Gemma 3", "GPT-OSS"]
TRIGGERS = {"trigger_token_ids": list(range(0, 300, 12)), "window_prefill": 1}
HOLDS_ALL = {**TRIGGERS, "budget": 512, "recent": 16, "t_max": 24}
SELECTS = {**TRIGGERS, "budget": 32, "recent": 16, "t_max": 12}
LENGTHS = [5, 33, 64, 210, 300, 130, 3]


def wide(name: str) -> Architecture:
    """Return an architecture with heads as wide as vLLM's CPU kernel wants them."""
    architecture = next(a for a in (*WORKS, *REFUSED) if a.name == name)
    tied = {"tie_word_embeddings": True} if "Gemma" in name else {}  # vLLM knows no other
    return replace(architecture, settings={"hidden_size": 128, "head_dim": 32, **architecture.settings, **tied})


def tiny(name: str) -> Any:
    """Build it; a tied one does not say its last token again and again, since its last norm turns signs."""
    model = wide(name).build()
    if model.config.tie_word_embeddings:
        draw = torch.Generator().manual_seed(1)
        weight = model.model.norm.weight.data
        weight.copy_(torch.randn(weight.shape, generator=draw) * 3 - 1)
    return model


def options(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder), "skip_tokenizer_init": True, "max_model_len": 512, **SMALL_BATCH,
        "max_num_batched_tokens": 200,
    }  # fmt: skip


def prompts() -> list[list[int]]:
    return [[(7 * i + 11 * k * k + k) % 290 + 5 for k in range(n)] for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_vllm_s_or_generate_s(name: str, tmp_path: Path):
    model = tiny(name)
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
