"""`Op`, its kernel's name and signature, and launches: counted, recorded, or refused with the limit."""

import inspect
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sfi_kernels
from sfi_kernels import launch as launching
from sfi_kernels import launch as module
from sfi_kernels.op import Op

CPU = torch.device("cpu")
SM_80 = launching.Target(80, 108)


class Kernel:
    def __init__(self, name: str = "_double_kernel"):
        self.__name__ = name
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.calls.append((grid, arguments, options))


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


def test_a_kernel_gets_its_grid_arguments_options_and_constants(kernel):
    score = torch.ones(3)
    launching.launch(kernel, (2, 3), score, 7, num_warps=8, num_stages=2, max_registers=255, SIZE=64)
    options = {"num_warps": 8, "num_stages": 2, "maxnreg": 255, "SIZE": 64}
    assert kernel.calls == [((2, 3), (score, 7), options)]


@pytest.mark.parametrize("grid", [(0,), (3, 0), (0, 2, 1)])
def test_an_empty_grid_launches_and_counts_nothing(kernel, grid):
    with launching.counting(counter := Counter()):
        launching.launch(kernel, grid, torch.ones(1))
    assert not kernel.calls
    assert not counter


def test_launches_are_counted_by_name():
    with launching.counting(counter := Counter()):
        for name in ("_pack_kernel", "_append_kernel", "_pack_kernel"):
            launching.launch(Kernel(name), (1,), torch.ones(1))
    launching.launch(Kernel(), (1,), torch.ones(1))
    assert counter == {"pack": 2, "append": 1}


def test_a_counter_inside_another_takes_its_launches_from_it(kernel):
    with launching.counting(outer := Counter()):
        launching.launch(kernel, (1,), torch.ones(1))
        with launching.counting(inner := Counter()):
            launching.launch(kernel, (1,), torch.ones(1))
            launching.launch(kernel, (1,), torch.ones(1))
        launching.launch(kernel, (1,), torch.ones(1))
    assert (outer["double"], inner["double"]) == (2, 2)


def test_counting_and_recording_end_with_an_error(kernel):
    counter = Counter()
    with pytest.raises(RuntimeError), launching.counting(counter), launching.recording(SM_80) as record:
        raise RuntimeError
    launching.launch(kernel, (1,), torch.ones(1))
    assert not counter
    assert not record.launches
    assert launching.target(CPU) == launching.INTERPRETED


def test_a_recorded_launch_is_not_made_nor_counted(kernel, monkeypatch):
    """And needs neither a GPU nor the interpreter."""
    score = torch.ones(3, dtype=torch.bfloat16)
    monkeypatch.delenv("TRITON_INTERPRET")
    with launching.counting(counter := Counter()), launching.recording(SM_80) as record:
        launching.launch(kernel, (2,), score, 7, 0.5, num_warps=8, num_stages=3, max_registers=255, SIZE=64)
    assert not kernel.calls
    assert not counter
    (launch,) = record.launches
    assert (launch.kernel, launch.arguments) == (kernel, (score, 7, 0.5))
    assert launch.constants == {"SIZE": 64}
    assert launch.options == {"num_warps": 8, "num_stages": 3, "maxnreg": 255}


def test_a_gpus_target_is_what_its_properties_say(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module._cuda_target.cache_clear()  # noqa: SLF001 - no test may see what another one made up
    try:
        assert launching.target(torch.device("cuda", 0)) == launching.Target(90, 132)
    finally:
        module._cuda_target.cache_clear()  # noqa: SLF001


@pytest.mark.parametrize("value", [None, "0"])
def test_without_a_gpu_or_the_interpreter_a_launch_is_refused(kernel, monkeypatch, value):
    monkeypatch.delenv("TRITON_INTERPRET")
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not launching.interpreted()
    message = (
        r"^Triton kernels need a CUDA device, got cpu; use the torch backend, "
        r"or set TRITON_INTERPRET=1 to test them without a GPU$"
    )
    with launching.counting(counter := Counter()), pytest.raises(launching.KernelLimitError, match=message):
        launching.launch(kernel, (1,), torch.ones(1))
    assert not kernel.calls
    assert not counter


def test_the_interpreter_refuses_bfloat16_in_any_argument(kernel):
    launching.check_device(CPU, torch.float32, torch.float16, torch.int32)
    operands = torch.ones(1), 3, torch.ones(1, dtype=torch.bfloat16)
    message = r"^bfloat16 comes out wrong in Triton's interpreter; use float32 or float16$"
    with pytest.raises(launching.KernelLimitError, match=message):
        launching.launch(kernel, (1,), *operands)
    assert not kernel.calls


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
        signature = inspect.signature(op.triton)
        more = [p for name, p in signature.parameters.items() if name not in known.parameters]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in more)
        shared = [p for p in signature.parameters.values() if p not in more]
        assert signature.replace(parameters=shared) == known


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> Op:
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
