"""Weight matrices on CPUs without arithmetic of their dtype: float32's products, and nothing else changes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn import Linear
from transformers import LlamaConfig, LlamaForCausalLM

import sfi_core
from sfi_core.models import linear
from sfi_core.models.linear import RowLinear, quick_linears
from sfi_kernels.compiled import why_not
from tests.architectures import COMMON
from tests.covering import each_value

MANY, FEW = linear.FEW, 4
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _crawling(monkeypatch: pytest.MonkeyPatch) -> None:
    # what a CPU without bfloat16 arithmetic says, whatever this one has
    monkeypatch.setattr(linear, "crawls", lambda dtype: dtype in HALVES)
    monkeypatch.setattr(linear, "PIECE", 16)  # less than the tests' matrices have


def llama(dtype: torch.dtype = torch.bfloat16, **settings):
    torch.manual_seed(0)
    config = LlamaConfig(**{**COMMON, **settings}, attention_bias=True)
    return LlamaForCausalLM(config).eval().to(dtype)


def layer(dtype: torch.dtype = torch.bfloat16, *, bias: bool = True) -> Linear:
    return Linear(64, 24, bias=bias).to(dtype).requires_grad_(requires_grad=False)


def product(module, rows: torch.Tensor) -> torch.Tensor:
    bias = None if module.bias is None else module.bias.double()
    return torch.nn.functional.linear(rows.double(), module.weight.double(), bias)


def test_another_thread_s_rows_go_through_the_layer_s_own_product(monkeypatch):
    pytest.importorskip("numba")

    def changed(*_) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr("sfi_kernels.numba_ops.multiply_few", changed)
    monkeypatch.setattr(linear, "LARGE", 1)
    module = layer(torch.float32)
    row = torch.ones(1, 64)
    plain = module(row)
    with quick_linears(Holder(module)), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(module, row).result(), plain)
        with pytest.raises(AssertionError):
            module(row)


@pytest.mark.parametrize(
    ("shape", "dtype", "bias"),
    each_value(
        [(MANY + 1, 64), (2, MANY, 64), (FEW, 64), (1, 1, 64), (0, 64)],
        [torch.float32, torch.bfloat16, torch.float16],
        [True, False],
    ),
)
def test_products_are_sums_in_float32_and_rounded_once(monkeypatch, shape, dtype: torch.dtype, *, bias: bool):
    monkeypatch.setattr(linear, "LARGE", 1)
    module, rows = layer(dtype, bias=bias), torch.randn(shape).to(dtype)
    expected = product(module, rows)
    with quick_linears(Holder(module)):
        assert type(module) is RowLinear or (why_not() and dtype is torch.float32)
        out = module(rows)
    assert type(module) is Linear
    assert (out.dtype, out.shape) == (dtype, (*shape[:-1], 24))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=max(eps / 64, 2e-6))


def test_small_matrices_and_odd_widths_of_float32_stay_as_they_are(monkeypatch):
    small, odd = layer(torch.float32), Linear(40, 24)
    with quick_linears(Holder(small)):
        assert type(small) is Linear
    monkeypatch.setattr(linear, "LARGE", 1)
    with quick_linears(Holder(odd)):
        assert type(odd) is Linear


@pytest.mark.parametrize(("native", "expected"), [(False, [1, 2, 8]), (True, [1])])
def test_a_cpu_with_16_bit_arithmetic_keeps_its_products_of_several_rows(monkeypatch, expected, *, native):
    pytest.importorskip("numba")
    from sfi_kernels import numba_ops as loops  # noqa: PLC0415

    monkeypatch.setattr(linear, "LARGE", 1)
    monkeypatch.setattr(linear, "crawls", lambda dtype: dtype in HALVES and not native)
    multiply, counts = loops.multiply_few, []
    monkeypatch.setattr(loops, "multiply_few", lambda matrix, x: counts.append(len(x)) or multiply(matrix, x))
    module = layer()
    with quick_linears(Holder(module)):
        for rows in (1, 2, 8, 9):
            module(torch.randn(rows, 64).bfloat16())
    assert counts == expected


class Holder(torch.nn.Module):
    def __init__(self, module: Linear) -> None:
        super().__init__()
        self.one, self.device, self.dtype = module, torch.device("cpu"), module.weight.dtype
        self.config = LlamaConfig()


def test_slow_fast_widens_while_it_lasts_and_leaves_the_model_as_it_was():
    model = llama()
    kinds = [type(module) for module in model.modules()]

    def interrupt(*_) -> None:
        assert type(model.lm_head) is RowLinear
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
        assert not any(isinstance(module, RowLinear) for module in model.modules())
