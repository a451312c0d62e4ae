"""What the tests of measuring share: small buffers for clocks, and a model with its tokenizer."""

from itertools import chain

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sfi_core.measure.kernel_bench import timing
from sfi_core.measure.kernel_bench.cases import groups
from sfi_core.measure.kernel_bench.settings import KernelSettings
from tests.core.conftest import TINY


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FLUSH_BYTES", 1 << 16)
    monkeypatch.setattr(timing, "COPY_BYTES", {"cpu": 1 << 16, "cuda": 1 << 16})


@pytest.fixture(scope="module")
def loaded(tiny_tokenizer) -> tuple:
    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=len(tiny_tokenizer), initializer_range=0.3, **TINY)
    return Qwen3ForCausalLM(config).eval(), tiny_tokenizer


SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 16, "context": 150, "batch": 2, "recent": 20}
CPU = torch.device("cpu")


def tiny(**changes) -> KernelSettings:
    return KernelSettings(**{**SHAPE, "dtype": "float32", "retentions": (0.5,), **changes})


def built(layer):
    return chain.from_iterable(variants for _, variants in groups(layer))


def one_of(layer, name: str):
    return next(variant for variant in built(layer) if variant.name == name)
