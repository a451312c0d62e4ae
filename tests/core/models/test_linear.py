"""Weight matrices on CPUs without arithmetic of their dtype: float32's products, and nothing else changes."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import Linear
from transformers import LlamaConfig, LlamaForCausalLM

import sfi_core
from sfi_core.errors import BackendError
from sfi_core.machine.private import without_onednn
from sfi_core.models import linear
from sfi_core.models.describe import ModelWeights
from sfi_core.models.linear import PackedLinear, RowLinear, WideLinear, pack_weights, quick_linears
from tests.architectures import COMMON
from tests.covering import each_value

MANY, FEW = linear.WIDE_ROWS, 4
fbgemm = pytest.mark.skipif(torch.backends.quantized.engine not in linear.ENGINES, reason="no FBGEMM on this machine")


@pytest.fixture(autouse=True)
def _crawling(monkeypatch: pytest.MonkeyPatch) -> None:
    # what a CPU without bfloat16 arithmetic says, whatever this one has
    monkeypatch.setattr(linear, "crawls", lambda dtype: dtype in linear.HALVES)
    monkeypatch.setattr(linear, "WIDE_FEATURES", 16)  # less than the tests' matrices have


def llama(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**COMMON, **settings}, attention_bias=True)
    return LlamaForCausalLM(config).eval().to(dtype)


def layer(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> Linear:
    return Linear(40, 24, bias=bias).to(dtype).requires_grad_(requires_grad=False)


def product(module: Any, rows: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else module.bias.double()
    return torch.nn.functional.linear(rows.double(), module.weight.double(), bias)


def test_another_thread_s_rows_go_through_the_layer_s_own_product(monkeypatch):
    def changed(*_: Any) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr("sfi_kernels.row_product.row_product", changed)
    monkeypatch.setattr(linear, "LARGE", 1)
    one = layer(torch.float32)
    row = torch.ones(1, 40)
    plain = one(row)
    with quick_linears(Holder(one)), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(one, row).result(), plain)
        if type(one) is RowLinear:  # numba is installed
            with pytest.raises(AssertionError):
                one(row)


@pytest.mark.parametrize(
    ("shape", "dtype", "bias"),
    each_value([(MANY, 40), (2, MANY // 2, 40), (FEW, 40), (1, 1, 40)], linear.HALVES, [True, False]),
)
def test_wide_products_are_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool):
    one, rows = layer(dtype, bias=bias), torch.randn(shape).to(dtype)
    with quick_linears(Holder(one)):
        assert type(one) is WideLinear
        out = one(rows)
    assert type(one) is Linear
    assert (out.dtype, out.shape) == (dtype, (*shape[:-1], 24))
    eps = torch.finfo(dtype).eps  # few rows are PyTorch's own product
    torch.testing.assert_close(out.double(), product(one, rows), rtol=eps, atol=2 * eps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_single_row_is_multiplied_in_another_way(monkeypatch, dtype: torch.dtype, *, bias: bool):
    pytest.importorskip("numba")
    monkeypatch.setattr(linear, "crawls", lambda _: False)
    one, rows = layer(dtype, bias=bias), torch.randn(1, 2, 40).to(dtype)
    with quick_linears(Holder(one)):
        assert type(one) is Linear, "small"
    monkeypatch.setattr(linear, "LARGE", 1)
    enabled = torch.backends.mkldnn.enabled
    with quick_linears(Holder(one)):
        assert type(one) is RowLinear
        out, several = one(rows[:, :1]), one(rows)
    assert torch.equal(several, one(rows)), "PyTorch's"
    assert torch.backends.mkldnn.enabled == enabled
    assert (out.dtype, out.shape) == (dtype, (1, 1, 24))
    eps = max(1e-6, torch.finfo(dtype).eps)
    torch.testing.assert_close(out.double(), product(one, rows[:, :1]), rtol=eps, atol=eps)


@fbgemm
@pytest.mark.parametrize(
    ("shape", "dtype", "bias"), each_value([(MANY, 40), (3, 40), (1, 1, 40), (0, 40)], linear.HALVES, [True, False])
)
def test_packed_products_are_rounded_once(shape: tuple[int, ...], dtype: torch.dtype, *, bias: bool):
    one, rows = layer(dtype, bias=bias), torch.randn(shape).to(dtype)
    expected = product(one, rows)
    weight = one.weight.clone()
    pack_weights(Holder(one))
    assert type(one) is PackedLinear
    out = one(rows)
    assert (out.dtype, out.shape) == (dtype, (*shape[:-1], 24))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=1e-5)
    torch.testing.assert_close(one.weight, weight, rtol=0.0, atol=2.0**-25)
    assert one.weight.dtype == dtype
    assert not list(one.parameters())


class Holder(torch.nn.Module):
    """What of a model these functions look at."""

    def __init__(self, one: Linear) -> None:
        super().__init__()
        self.one, self.device, self.dtype = one, torch.device("cpu"), one.weight.dtype
        self.config = LlamaConfig()


def test_slow_fast_widens_while_it_lasts_and_leaves_the_model_as_it_was():
    model = llama()
    kinds = [type(module) for module in model.modules()]

    def interrupt(*_: Any) -> None:
        assert type(model.lm_head) is WideLinear
        raise KeyboardInterrupt

    model.lm_head.register_forward_pre_hook(interrupt)
    ids = torch.randint(2, 300, (1, 40))
    config = sfi_core.SfiConfig(trigger_policy="never")
    with pytest.raises(KeyboardInterrupt), sfi_core.slow_fast(model, None, config):
        model.generate(ids, max_new_tokens=2)
    assert [type(module) for module in model.modules()] == kinds


def test_float32_models_and_other_modules_stay_as_they_are():
    model = llama(torch.float32)
    with quick_linears(model):
        assert not any(isinstance(module, WideLinear) for module in model.modules())


@fbgemm
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_decodes_like_the_same_weights_in_float32(*, tied: bool):
    model = llama(tie_word_embeddings=tied)
    exact = copy.deepcopy(model).float()
    told: list[tuple[int, int]] = []
    pack_weights(model, lambda done, total: told.append((done, total)))
    assert told == [(done, 15) for done in range(1, 16)]  # seven a layer, and the head
    ids = torch.randint(2, 300, (2, 60))
    config = sfi_core.SfiConfig(trigger_policy="never", sink=2, recent=8, budget=16)
    with torch.no_grad(), sfi_core.slow_fast(model, None, config):
        logits = model.generate(
            ids, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    with torch.no_grad():
        expected = exact(ids).logits[:, -1]
    torch.testing.assert_close(logits.logits[0].float(), expected, rtol=0.05, atol=0.02)


@fbgemm
@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_are_counted_where_they_are_read(*, tied: bool):
    model = llama(tie_word_embeddings=tied)
    before = ModelWeights.of(model)
    biases = sum(w.numel() for name, w in model.named_parameters() if name.endswith("bias"))
    pack_weights(model)
    after = ModelWeights.of(model)
    embedding = 300 * 64 * 2
    assert after.total_bytes == before.total_bytes - 2 * biases + (embedding if tied else 0)
    assert after.read() == before.read() - 2 * biases


@fbgemm
def test_a_weight_beyond_float16_keeps_its_layer_unpacked():
    model = llama()
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = 1e5
    pack_weights(model)
    plain = [name for name, module in model.named_modules() if type(module) is Linear]
    assert plain == ["model.layers.0.mlp.up_proj"]


@pytest.mark.parametrize(
    ("dtype", "device", "message"),
    [
        (torch.float32, "cpu", "packed weights must be bfloat16 or float16 on a CPU, got float32 on cpu"),
        (torch.bfloat16, "meta", "packed weights must be bfloat16 or float16 on a CPU, got bfloat16 on meta"),
    ],
)
def test_what_cannot_be_packed_is_refused(dtype: torch.dtype, device: str, message: str):
    with pytest.raises(BackendError, match=message):
        pack_weights(llama(dtype).to(device))


def test_a_machine_without_fbgemm_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "ENGINES", ())
    with pytest.raises(BackendError, match="need FBGEMM"):
        pack_weights(llama())


def test_onednn_is_on_again_once_the_last_of_two_threads_is_done():
    before, both = torch._C._get_mkldnn_enabled(), (without_onednn(), without_onednn())  # noqa: SLF001
    for products in both:
        products.__enter__()
    for products in both:
        assert not torch._C._get_mkldnn_enabled()  # noqa: SLF001
        products.__exit__(None, None, None)
    assert torch._C._get_mkldnn_enabled() == before  # noqa: SLF001
