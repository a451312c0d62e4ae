"""What the core's tests share: a tiny random model, the bundled tokenizer, and poisoned memory."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.train_bundled import build_tokenizer

TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024,
}  # fmt: skip


def tiny_qwen3(vocab_size: int = 96, layers: int = 2):
    """Make a random model whose attention is peaked enough to make selection matter."""
    torch.manual_seed(0)
    sizes = {**TINY, "num_hidden_layers": layers}
    config = Qwen3Config(vocab_size=vocab_size, initializer_range=0.3, **sizes)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tiny_model():
    return tiny_qwen3()


@pytest.fixture(scope="session")
def tiny_tokenizer():
    return build_tokenizer(TINY["max_position_embeddings"])


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `Tensor.new_empty` returns with NaN, so that reading unwritten rows shows."""
    allocate = torch.Tensor.new_empty

    def poisoned(tensor: torch.Tensor, *size, **options) -> torch.Tensor:
        out = allocate(tensor, *size, **options)
        integer = {torch.uint8: 255, torch.uint16: 65_535}.get(out.dtype, -(2**30))
        return out.fill_(torch.nan if out.is_floating_point() else integer)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def poisoned_host_memory(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """Fill what `torch.empty` returns with NaN as well: pages of the host's tier."""
    allocate = torch.empty

    def poisoned(*size, **options) -> torch.Tensor:
        out = allocate(*size, **options)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
