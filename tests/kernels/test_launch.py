"""Launching Triton kernels: counted, recorded, or refused with the limit and what else to do."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sfi_kernels import launch as module
from sfi_kernels.launch import (
    INTERPRETED,
    KernelLimitError,
    Target,
    check_device,
    counting,
    interpreted,
    launch,
    recording,
    target,
)

CPU = torch.device("cpu")
SM_80 = Target(80, 108)


class Kernel:
    """A kernel that writes down how it was launched."""

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
    launch(kernel, (2, 3), score, 7, num_warps=8, num_stages=2, max_registers=255, SIZE=64)
    options = {"num_warps": 8, "num_stages": 2, "maxnreg": 255, "SIZE": 64}
    assert kernel.calls == [((2, 3), (score, 7), options)]


@pytest.mark.parametrize("grid", [(0,), (3, 0), (0, 2, 1)])
def test_an_empty_grid_launches_and_counts_nothing(kernel, grid):
    with counting(counter := Counter()):
        launch(kernel, grid, torch.ones(1))
    assert not kernel.calls
    assert not counter


def test_launches_are_counted_by_name():
    with counting(counter := Counter()):
        for name in ("_pack_kernel", "_append_kernel", "_pack_kernel"):
            launch(Kernel(name), (1,), torch.ones(1))
    launch(Kernel(), (1,), torch.ones(1))
    assert counter == {"pack": 2, "append": 1}


def test_a_counter_inside_another_takes_its_launches_from_it(kernel):
    with counting(outer := Counter()):
        launch(kernel, (1,), torch.ones(1))
        with counting(inner := Counter()):
            launch(kernel, (1,), torch.ones(1))
            launch(kernel, (1,), torch.ones(1))
        launch(kernel, (1,), torch.ones(1))
    assert (outer["double"], inner["double"]) == (2, 2)


def test_counting_and_recording_end_with_an_error(kernel):
    counter = Counter()
    with pytest.raises(RuntimeError), counting(counter), recording(SM_80) as record:
        raise RuntimeError
    launch(kernel, (1,), torch.ones(1))
    assert not counter
    assert not record.launches
    assert target(CPU) == INTERPRETED


def test_a_recorded_launch_is_not_made_nor_counted(kernel, monkeypatch):
    """And needs neither a GPU nor the interpreter."""
    score = torch.ones(3, dtype=torch.bfloat16)
    monkeypatch.delenv("TRITON_INTERPRET")
    with counting(counter := Counter()), recording(SM_80) as record:
        launch(kernel, (2,), score, 7, 0.5, num_warps=8, num_stages=3, max_registers=255, SIZE=64)
    assert not kernel.calls
    assert not counter
    (made,) = record.launches
    assert (made.kernel, made.arguments) == (kernel, (score, 7, 0.5))
    assert made.constants == {"SIZE": 64}
    assert made.options == {"num_warps": 8, "num_stages": 3, "maxnreg": 255}


def test_a_gpus_target_is_what_its_properties_say(monkeypatch):
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    module._cuda_target.cache_clear()  # noqa: SLF001 - no test may see what another one made up
    try:
        assert target(torch.device("cuda", 0)) == Target(90, 132)
    finally:
        module._cuda_target.cache_clear()  # noqa: SLF001


@pytest.mark.parametrize("value", [None, "0"])
def test_without_a_gpu_or_the_interpreter_a_launch_is_refused(kernel, monkeypatch, value):
    monkeypatch.delenv("TRITON_INTERPRET")
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert not interpreted()
    message = (
        r"^Triton kernels need a CUDA device, got cpu; use the torch backend, "
        r"or set TRITON_INTERPRET=1 to test them without a GPU$"
    )
    with counting(counter := Counter()), pytest.raises(KernelLimitError, match=message):
        launch(kernel, (1,), torch.ones(1))
    assert not kernel.calls
    assert not counter


def test_the_interpreter_refuses_bfloat16_in_any_argument(kernel):
    check_device(CPU, torch.float32, torch.float16, torch.int32)
    operands = torch.ones(1), 3, torch.ones(1, dtype=torch.bfloat16)
    message = r"^bfloat16 comes out wrong in Triton's interpreter; use float32 or float16$"
    with pytest.raises(KernelLimitError, match=message):
        launch(kernel, (1,), *operands)
    assert not kernel.calls
