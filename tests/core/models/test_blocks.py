"""Matrices of blocks: gguf's numbers bit by bit, float32's products, and models that are loaded with them."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from sfi_core import SfiConfig, generate, load
from sfi_core.errors import BackendError, ConfigError
from sfi_core.models.blocks import BYTES, LARGE, Blocks
from sfi_core.models.describe import ModelWeights
from sfi_core.models.linear import BlockEmbedding, BlockLinear
from sfi_kernels.tables import BLOCK
from tests.core.conftest import TINY

pytest.importorskip("numba")
pytest.importorskip("gguf")
import gguf

from tests.core.models.test_gguf import TEXT, finish, write_config, write_tokenizer

MODELS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, gguf.MODEL_ARCH.LLAMA),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, gguf.MODEL_ARCH.QWEN2),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM, gguf.MODEL_ARCH.GEMMA3),
}


def packed_rows(kind: str, count: int, width: int) -> np.ndarray:
    """Return random rows of a type; gguf does not quantize the K types, whose bytes are drawn."""
    numbers = np.random.default_rng(7).standard_normal((count, width)).astype(np.float32)
    if kind[-1] != "K":
        return gguf.quantize(numbers, gguf.GGMLQuantizationType[kind])
    blocks = np.random.default_rng(7).integers(0, 256, (count * width // LARGE, BYTES[kind]), np.uint8)
    factors = (numbers.reshape(len(blocks), -1)[:, :2] / 100).astype(np.float16).view(np.uint8)
    places = [208, 209] if kind == "Q6_K" else [0, 1, 2, 3]
    blocks[:, places] = factors[:, : len(places)]
    return blocks.reshape(count, -1)


@pytest.mark.parametrize("kind", BYTES)
def test_blocks_have_gguf_s_numbers_and_float32_s_products(kind: str):
    count, width = 603, 2 * LARGE if kind[-1] == "K" else 11 * BLOCK  # no whole words of blocks
    packed, order = packed_rows(kind, count, width), np.random.default_rng(1).permutation(count)
    quantization = gguf.GGMLQuantizationType[kind]
    blocks, expected = Blocks.unpacked(packed, quantization, order), gguf.dequantize(packed, quantization)[order]
    assert np.array_equal(blocks.floats().numpy().view(np.int32), expected.view(np.int32))
    layer = BlockLinear(blocks, torch.nn.Parameter(torch.randn(count)))
    plain = torch.nn.functional.linear
    for rows in (0, 1, 32, 33):
        x = torch.randn(rows, 1, width)
        exact = plain(x.double(), torch.from_numpy(expected).double(), layer.bias.detach().double())
        torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=3e-4 * float(exact.std()) if rows else 0)


def test_rounded_numbers_are_half_a_level_away_at_most():
    weight = torch.randn(40, 96)
    weight[3, 32:64] = 0
    blocks = Blocks.rounded(weight)
    error = (blocks.floats() - weight).abs().view(40, 3, 32)
    assert (error <= 0.5001 * weight.view(40, 3, 32).abs().amax(-1, keepdim=True) / 127).all()
    assert blocks.nbytes == 40 * 96 * 17 // 16


def test_a_layer_is_copied_saved_and_run_in_threads():
    layer = BlockLinear(Blocks.rounded(torch.randn(64, 32)))
    x = torch.randn(2, 32)
    out = layer(x)
    twin = copy.deepcopy(layer)
    assert not np.array_equal(twin.matrix, layer.matrix), "its own addresses"
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(out, other) for other in pool.map(twin, [x] * 8))
    assert torch.equal(layer.state_dict()["weight"], layer.blocks.floats())
    assert torch.equal(layer.to("cpu").float()(x), out)
    with pytest.raises(BackendError, match=r"^a model of weight blocks is float32 on a CPU, got bfloat16 on cpu; load"):
        layer.to(torch.bfloat16)
    with pytest.raises(IndexError, match=r"^rows must be in 0 to 63, got \[64\]$"):
        BlockEmbedding(layer.blocks)(torch.tensor([64]))


@pytest.fixture
def write(tmp_path: Path, tiny_tokenizer) -> Callable[..., Path]:
    """Return what writes a tiny model of an architecture as a GGUF file with blocks."""

    def written(architecture: str, kind: str = "Q8_0", *, tied: bool = True) -> Path:
        config_class, model_class, names = MODELS[architecture]
        torch.manual_seed(0)
        sizes = TINY | {"num_hidden_layers": 6} if architecture == "gemma3" else TINY  # one of 6 layers attends to all
        config = config_class(
            vocab_size=len(tiny_tokenizer), initializer_range=0.3, tie_word_embeddings=tied, sliding_window=512, **sizes
        )
        model = model_class(config).eval()
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(weight)
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
        write_config(writer, config)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(512)
        write_tokenizer(writer, tiny_tokenizer, "gpt2", "smollm")
        of_name = gguf.get_tensor_name_map(names, config.num_hidden_layers)
        for name, weight in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            stem, _, end = name.rpartition(".")
            numbers, kind_of = weight.detach().float().numpy(), gguf.GGMLQuantizationType[kind]
            if numbers.ndim == 1:
                more = np.float32(architecture == "gemma3")  # llama.cpp adds the 1 that transformers adds at each use
                writer.add_tensor(f"{of_name.get_name(stem)}.{end}", numbers + more)
            else:
                packed = gguf.quantize(numbers, kind_of)
                writer.add_tensor(f"{of_name.get_name(stem)}.{end}", packed, raw_dtype=kind_of)
        finish(writer)
        return tmp_path / "x.gguf"

    return written


def answer(model, tokenizer) -> list[int]:
    config = SfiConfig(budget=8, recent=8, sink=2)
    result = generate(model, tokenizer, [TEXT], config, max_new_tokens=12, stop_token_ids=())
    return result.report.requests[0].token_ids


@pytest.mark.parametrize(
    ("architecture", "kind", "tied"),
    [("llama", "Q4_1", True), ("llama", "Q5_0", False), ("qwen2", "Q8_0", False), ("gemma3", "Q8_0", True)],
)
def test_a_file_s_blocks_give_the_tokens_of_its_floats(architecture, kind, write, *, tied):
    path = write(architecture, kind, tied=tied)
    model, tokenizer = load(str(path), device="cpu")
    plain = load(str(path), device="cpu", weights="floats")[0]
    assert model.sfi_weights.blocks == {kind: 7 * model.config.num_hidden_layers + (1 if tied else 2)}
    assert not model.sfi_weights.floats
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert all(type(layer) is BlockLinear for layer in layers)
    assert {name: weight.shape for name, weight in model.state_dict().items()} == {
        name: weight.shape for name, weight in plain.state_dict().items()
    }
    assert all(torch.equal(weight, plain.state_dict()[name]) for name, weight in model.state_dict().items())
    tokens = answer(model, tokenizer)
    assert tokens == answer(plain, tokenizer)
    assert len(set(tokens)) > 1
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids[:, :6]).logits, plain(ids[:, :6]).logits, rtol=0, atol=2e-3)
    floats, blocks = ModelWeights.of(plain), ModelWeights.of(model)
    assert blocks.total_bytes < 0.6 * floats.total_bytes  # rows of two blocks take whole words
    assert (blocks.unread_bytes == 0) == (floats.unread_bytes == 0) == tied


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda weights: weights[:, ::-1], "transformers changes its numbers"),
        (lambda weights: weights * 2, "transformers changes its numbers"),
        (lambda weights: weights.T, "transformers changes its shape"),
    ],
)
def test_what_transformers_changes_is_loaded_as_floats(spoil, reason, write, monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as loader  # noqa: PLC0415

    class Processor(loader.TensorProcessor):
        def process(self, weights, name: str, **_):
            return loader.GGUFTensor(spoil(weights) if ".attn_output." in name else weights, name, {})

    monkeypatch.setitem(loader.TENSOR_PROCESSORS, "qwen2", Processor)
    path = write("qwen2")
    model, tokenizer = load(str(path), device="cpu")
    assert model.sfi_weights.floats == {f"model.layers.{layer}.self_attn.o_proj.weight": reason for layer in range(2)}
    assert answer(model, tokenizer) == answer(load(str(path), device="cpu", weights="floats")[0], tokenizer)


@pytest.mark.parametrize(
    ("kind", "dtype", "numba", "reason"),
    [
        ("BF16", "auto", "", "BF16 has no compiled product"),
        ("Q8_0", "bfloat16", "", "not float32 on a CPU"),
        ("Q8_0", "auto", "not installed", "numba: not installed"),
    ],
)
def test_other_files_dtypes_and_machines_load_floats(kind, dtype, numba, reason, write, monkeypatch):
    monkeypatch.setattr("sfi_core.models.linear.why_not", lambda: numba)
    model, _ = load(str(write("llama", kind)), device="cpu", dtype=dtype)
    assert not model.sfi_weights.blocks
    assert set(model.sfi_weights.floats.values()) == {reason}
    assert not any(isinstance(module, BlockLinear) for module in model.modules())


def test_a_loop_that_does_not_compile_is_named(monkeypatch: pytest.MonkeyPatch, write: Callable[..., Path]):
    def broken(*_) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr("sfi_kernels.loops.products.linear", broken)
    model, _ = load(str(write("llama")), device="cpu")
    assert model.sfi_weights.floats == {"": "numba: no such instruction"}


def test_int8_weights_replace_every_matrix_and_stay_near(monkeypatch: pytest.MonkeyPatch):
    model, tokenizer = load(device="cpu", weights="int8")
    plain, _ = load(device="cpu", dtype="float32")
    assert {type(m) for m in model.modules() if isinstance(m, torch.nn.Linear)} == {BlockLinear}
    ids = tokenizer("It was a bright cold day in April, and the clocks were", return_tensors="pt").input_ids
    with torch.no_grad():
        rounded, exact = (m(ids).logits.log_softmax(-1) for m in (model, plain))
    divergence = torch.nn.functional.kl_div(rounded, exact, log_target=True, reduction="none").sum(-1)
    assert 0 < float(divergence.mean()) < 0.01
    monkeypatch.setattr("sfi_core.models.load.torchrun.size", lambda: 2)
    with pytest.raises(BackendError, match=r"^weights=int8 cannot be split over ranks, got 2$"):
        load(device="cpu", weights="int8")


def test_unpacked_weights_can_be_asked_for(write: Callable[..., Path]):
    model, _ = load(str(write("llama")), device="cpu", weights="floats")
    assert model.sfi_weights.floats == {"": "asked for floats"}
    with pytest.raises(ConfigError, match=r"^unknown weights 'int4'; did you mean 'int8'"):
        load(device="cpu", weights="int4")


def test_a_folder_s_matrices_are_no_blocks_and_nothing_says_so():
    model, _ = load()
    report = generate(model, None, [[1, 2, 3]], SfiConfig(trigger_policy="never"), max_new_tokens=2).report
    assert report.not_blocks == {}
