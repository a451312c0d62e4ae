"""Runs with graphs, for which a tape stands."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import sfi_core
from sfi_core import EngineOptions
from tests.architectures import tiny
from tests.core.conftest import TINY, tiny_qwen3
from tests.fake_graph import FakeRecorder, use_tensors
from tests.fakes import Listener
from tests.replays import CONFIG, NEW, PROMPTS


@pytest.fixture(scope="module")
def models() -> dict:
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=96, initializer_range=0.3, **TINY)).eval()
    hybrid, gemma = tiny("granite-4"), tiny("gemma-2")
    return {"qwen3": tiny_qwen3(), "llama": llama, "small": tiny_qwen3(layers=1), "gemma-2": gemma, "hybrid": hybrid}


@pytest.fixture
def recorder(monkeypatch) -> FakeRecorder:
    recorder = FakeRecorder()
    recorder.install(monkeypatch)
    return recorder


@pytest.fixture
def complete(monkeypatch, models, recorder):
    """Run with or without graphs; return all that the run said."""
    use_tensors(monkeypatch)

    def run(graphs: bool | None, name: str = "qwen3", **options) -> tuple:
        observer = Listener()
        options = {"config": CONFIG, "max_new_tokens": NEW, "stop_token_ids": (), "prompts": PROMPTS, **options}
        result = sfi_core.generate(
            models[name], None, options.pop("prompts"), page_size=16,
            observers=[observer, *options.pop("observers", [])],
            engine=EngineOptions(
                backend="triton", graphs=graphs, lossless=options.pop("lossless", False), kv_page=16,
                kv_device_budget=options.pop("tiers", None),
            ), **options,
        )  # fmt: skip
        return result.report, observer

    return run
