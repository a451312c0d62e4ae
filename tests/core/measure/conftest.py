"""What the tests of measuring share: small buffers for clocks, and a model with its tokenizer."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sfi_core.measure.kernel_bench import timing
from tests.core.conftest import TINY


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16})


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=len(tiny_tokenizer), initializer_range=0.3, **TINY)
    return Qwen3ForCausalLM(config).eval(), tiny_tokenizer
