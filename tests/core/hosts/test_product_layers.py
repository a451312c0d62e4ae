"""Layers whose products are kernels of ours: the same tokens, eagerly and replayed, and what keeps them from it."""

from collections import Counter

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, slow_fast
from sfi_core.errors import BackendError, ConfigError
from sfi_core.hosts.transformers.fusion import fused
from sfi_core.hosts.transformers.product_layers import own_products
from sfi_kernels.launch import counting
from tests.core.hosts.test_fusion import CONFIG, DEVICE, PROMPTS, launched, quick, tiny
from tests.covering import first
from tests.fake_graph import FakeRecorder

__all__ = ["quick"]
IDS = torch.tensor([[7, 11, 3]], device=DEVICE)
NEW = 4
AHEAD = CONFIG.replace(codescan={"ahead": "half"})


def decoded(model, policy: str, prompts: list[list[int]], **switches: bool):
    engine = EngineOptions(backend="triton", fused=True, **switches)
    options = {"page_size": 16, "max_new_tokens": NEW, "stop_token_ids": (), "engine": engine}
    return sfi_core.generate(model, None, prompts, AHEAD, policy=policy, **options).report


@pytest.mark.skipif(DEVICE == "cuda", reason="on CPU tensors")
@pytest.mark.parametrize(
    ("kind", "policy", "rows"), first([("qwen3", "codescan", 2), ("qwen2", "sfi", 1), ("llama", "full-kv", 2)])
)
def test_replayed_steps_with_own_products_give_the_same_tokens(monkeypatch, quick, kind: str, policy: str, rows: int):
    """With norms of heads (Qwen3) or biases (Qwen2), and with queries predicted early."""
    recorder = FakeRecorder()
    recorder.install(monkeypatch)
    model, prompts = tiny(kind), PROMPTS[:rows]
    plain = decoded(model, policy, prompts, graphs=False)
    ours = decoded(model, policy, prompts, graphs=True, products=True)
    assert recorder.plays > 0
    assert [r.token_ids for r in ours.requests] == [r.token_ids for r in plain.requests]
    # prompts are read as ever; the last norm is a kernel of its own, and so is that of a predicted query
    steps, layers = NEW - 1, 2
    assert launched(ours)["project"] == 4 * steps * layers
    assert launched(plain)["silu_mul"] - launched(ours)["silu_mul"] == steps * layers
    assert "project" not in launched(plain)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_up_to_16_rows_are_multiplied_by_the_kernel_and_more_by_pytorch(kind: str):
    model, passes = tiny(kind), (IDS[:, :1], IDS, IDS.repeat(6, 1))
    for layer in model.model.layers:
        if kind == "qwen2":  # zeros, which no missing bias would show
            torch.nn.init.uniform_(layer.self_attn.q_proj.bias, -1, 1)
    with torch.no_grad():
        plain = [model(ids).logits for ids in passes]
        with fused(model) as fusion:
            forward = model.model.layers[0].forward
            with own_products(fusion):
                outputs = [products_of(model, ids) for ids in passes]
            assert model.model.layers[0].forward == forward
    assert [count for _, count in outputs] == [8, 8, 0]
    torch.testing.assert_close([logits for logits, _ in outputs], plain, rtol=1e-4, atol=1e-4)


def products_of(model, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    with counting(Counter()) as launches:
        return model(ids).logits, launches["project"]


@pytest.mark.parametrize("name", ["self_attn", "self_attn.o_proj", "mlp.act_fn", "mlp.up_proj", "input_layernorm"])
def test_a_layer_with_a_hook_inside_runs_as_before(name: str):
    model, heard = tiny("llama"), []
    model.model.layers[0].get_submodule(name).register_forward_hook(lambda *_: heard.append(name))
    with torch.no_grad(), fused(model) as fusion, own_products(fusion):
        assert products_of(model, IDS)[1] == 4, "of the other layer"
    assert heard == [name]


def test_layers_of_experts_and_gradients_run_as_before():
    mixtral, llama = tiny("mixtral"), tiny("llama")
    with torch.no_grad(), fused(mixtral) as fusion, own_products(fusion):
        assert products_of(mixtral, IDS)[1] == 0
    with fused(llama) as fusion, own_products(fusion):
        assert products_of(llama, IDS)[1] == 0


def test_own_products_are_for_fused_models_on_triton():
    with pytest.raises(ConfigError, match=r"^engine.products must be false without engine.fused, got true$"):
        EngineOptions(products=True, fused=False)
    engine = EngineOptions(backend="torch", products=True)
    message = r"^engine.products must be false on the torch backend, got true$"
    with pytest.raises(BackendError, match=message), slow_fast(tiny("llama"), engine=engine, config=CONFIG):
        pass
