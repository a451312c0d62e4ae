"""`Op`, and the rule that a Triton kernel has its reference's name and signature."""

import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sfi_kernels
from sfi_kernels.op import Op

HOME = Path(sfi_kernels.__path__[0])
PACKAGES = sorted(path.parent.name for path in HOME.glob("*/reference.py"))
ON_CPU = {"dense_attention_with_logits"}  # a kernel has no other way to the logits


def ops(package: str) -> dict[str, Op]:
    module = import_module(f"sfi_kernels.{package}")
    return {name: value for name, value in vars(module).items() if isinstance(value, Op)}


def double(score: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Double the score."""
    return score * 2**times


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_with_a_reference_exports_its_ops(package: str):
    assert ops(package)
    for name, op in ops(package).items():
        assert op.reference.__name__ == name
        assert op.reference.__module__ == f"sfi_kernels.{package}.reference"


@pytest.mark.parametrize("package", PACKAGES)
def test_reference_and_triton_have_one_signature_but_for_what_benchmarks_vary(package: str):
    pytest.importorskip("triton")
    for op in (op for name, op in ops(package).items() if name not in ON_CPU):
        known = inspect.signature(op.reference)
        own = inspect.signature(op.triton)
        more = [p for name, p in own.parameters.items() if name not in known.parameters]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in more)
        shared = [p for p in own.parameters.values() if p not in more]
        assert own.replace(parameters=shared) == known


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> Op:
    """Return an op whose package is a fake with a kernel."""
    monkeypatch.setattr(double, "__module__", "fake_op.reference")
    kernel = SimpleNamespace(double=lambda score, times=1: "kernel")
    monkeypatch.setitem(sys.modules, "fake_op.triton", kernel)
    monkeypatch.setitem(sys.modules, "fake_op", SimpleNamespace(triton=kernel, __path__=[]))
    return Op(double)


class OnCuda(torch.Tensor):
    is_cuda = True


def test_an_op_shows_the_name_docstring_and_signature_of_its_reference():
    op = Op(double)
    assert (op.__name__, op.__doc__) == ("double", "Double the score.")
    assert inspect.signature(op) == inspect.signature(double)


def test_an_op_off_the_gpu_runs_its_reference_and_imports_no_kernel():
    op = Op(double)
    assert op(times=2, score=torch.ones(1)).item() == op(torch.ones(1), 2).item() == 4
    assert op.on("torch") is double
    with pytest.raises(ModuleNotFoundError):
        _ = op.triton


def test_a_tensor_on_cuda_runs_the_kernel_even_when_passed_by_name(with_kernel):
    op, score = with_kernel, torch.ones(1).as_subclass(OnCuda)
    assert (op(score), op(times=2, score=score)) == ("kernel", "kernel")
    assert op(torch.ones(1), score) == "kernel"  # pages on the host, before what is on the device
    assert op.reference(score).item() == 2


def test_a_backend_names_an_implementation_whatever_the_device(with_kernel):
    assert with_kernel.on("triton")(torch.ones(1)) == "kernel"
    assert with_kernel.on("torch")(torch.ones(1).as_subclass(OnCuda)).item() == 2


def test_another_backend_is_a_mistake():
    with pytest.raises(KeyError, match="cuda"):
        Op(double).on("cuda")
