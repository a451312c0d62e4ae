"""Launches Triton kernels, for all ops; counts the launches, or records them without a GPU."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch

V = TypeVar("V")


class KernelLimitError(ValueError):
    """A kernel cannot take a shape, dtype or device; the message names the limit and the alternative."""


class Target(NamedTuple):
    """A GPU: its compute capability times ten (80, 90, 100) and its streaming multiprocessors."""

    capability: int
    processors: int


class Launch(NamedTuple):
    """A recorded launch: the `triton.jit` function, positional arguments, constexprs and options."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, int]


class Recording(NamedTuple):
    """Launches that ops would make on a target, to compile without a GPU."""

    target: Target
    launches: list[Launch]


_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)
_counter: ContextVar[Counter[str] | None] = ContextVar("counter", default=None)
_chains: ContextVar[bool] = ContextVar("chains", default=False)
HOPPER = 90  # the first compute capability, times ten, that chains launches
# the interpreter has no processors; four make plans that split, at sizes that tests can afford
INTERPRETED = Target(90, 4)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    num_warps: int = 4,
    num_stages: int = 1,
    max_registers: int | None = None,
    contracts: int = 1,
    **constants: Any,
) -> None:
    """Launch a `triton.jit` kernel on its first tensor's device, or record the launch inside `recording`.

    `arguments` are all but the constexprs, which are `constants`. `max_registers` limits a thread; None leaves that to
    the compiler. With `contracts=0` a product and a sum stay two instructions, each of which rounds. Kernels with a
    constexpr `CHAINED` are chained where `counting` says so (`chained_triton`).
    """
    options = {"num_warps": num_warps, "num_stages": num_stages}
    if max_registers is not None:
        options["maxnreg"] = max_registers
    if not contracts:
        options["enable_fp_fusion"] = False
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    device = tensors[0].device
    if "CHAINED" in getattr(kernel, "arg_names", ()):
        constants["CHAINED"] = _chains.get() and target(device).capability >= HOPPER
        if constants["CHAINED"]:
            options["launch_pdl"] = True
    record = _recording.get()
    if record is not None:
        record.launches.append(Launch(kernel, arguments, constants, options))
        return
    if 0 in grid:
        return
    check_device(device, *(tensor.dtype for tensor in tensors))
    counter = _counter.get()
    if counter is not None:
        counter[name_of(kernel)] += 1
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*arguments, **options, **constants)


def name_of(kernel: Any) -> str:
    """Return a kernel's name without `_` and `_kernel`."""
    return str(kernel.__name__).strip("_").removesuffix("_kernel")


def check_device(device: torch.device, *dtypes: torch.dtype) -> None:
    """Raise `KernelLimitError` where no kernel runs, and for bfloat16 in Triton's interpreter."""
    if device.type == "cuda":
        return
    if not interpreted():
        raise KernelLimitError(
            f"Triton kernels need a CUDA device, got {device.type}; use the torch backend, "
            "or set TRITON_INTERPRET=1 to test them without a GPU"
        )
    if torch.bfloat16 in dtypes:
        raise KernelLimitError("bfloat16 comes out wrong in Triton's interpreter; use float32 or float16")


def interpreted() -> bool:
    """Say whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def target(device: torch.device) -> Target:
    """Return the target that kernels on a device are configured for."""
    record = _recording.get()
    if record is not None:
        return record.target
    return _cuda_target(device) if device.type == "cuda" else INTERPRETED


@cache
def _cuda_target(device: torch.device) -> Target:
    properties = torch.cuda.get_device_properties(device)
    return Target(10 * properties.major + properties.minor, properties.multi_processor_count)


@contextmanager
def setting(variable: ContextVar[Any], value: V) -> Iterator[V]:
    """Give a context variable a value inside."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextmanager
def counting(counter: Counter[str], *, chained: bool = False) -> Iterator[Counter[str]]:
    """Count the launches inside by kernel; a nested `counting` takes its own. `chained` ones follow `check_chained`."""
    with setting(_chains, chained), setting(_counter, counter):
        yield counter


def check_chained(device: torch.device) -> None:
    """Raise `KernelLimitError` where launches cannot be chained."""
    if device.type != "cuda" or target(device).capability < HOPPER:
        raise KernelLimitError("engine.chained needs a CUDA device of capability 9.0 or newer")
    if not import_module("sfi_kernels.chained_triton").AVAILABLE:
        raise KernelLimitError("engine.chained needs Triton 3.5 or newer")


def recording(target: Target) -> AbstractContextManager[Recording]:
    """Record the launches inside instead of making them; the ops' results are then undefined."""
    return setting(_recording, Recording(target, []))
