"""The run of the kernel benchmark: check every variant, then time all of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sfi_core.errors import BackendError, MemoryForecastError
from sfi_core.machine.describe import describe_measured
from sfi_core.machine.memory import free_bytes
from sfi_core.measure.kernel_bench.bytes_moved import forecast_bytes
from sfi_core.measure.kernel_bench.result import KernelResult, Measurement
from sfi_core.measure.kernel_bench.settings import REPEATS, KernelSettings
from sfi_core.measure.kernel_bench.step_variants import FETCHED_EVERY
from sfi_core.measure.kernel_bench.timing import CpuClock, clock_for, copy_gb_per_s, floor_us, workspace_bytes
from sfi_core.measure.kernel_bench.variant import reason
from sfi_core.measure.kernel_bench.variants import KernelVariants
from sfi_kernels.launch import KernelLimitError, counting

Progress = Callable[[str, int, int], None]


def run_bench(
    settings: KernelSettings, backend: str, device: torch.device, progress: Progress = lambda *_: None
) -> KernelResult:
    """Check every variant, then time the variants in turns.

    `progress` gets the phase, the calls done and the number of calls. A variant that fails is noted and not
    timed; see `KernelResult.check`.

    Raises:
        MemoryForecastError: The inputs and their checks do not fit into memory.
        BackendError: A kernel does not take this shape.
    """
    _check_fits(settings, backend, device)
    result = KernelResult(settings, backend)
    try:
        _run(result, device, progress)
    except KeyboardInterrupt:
        result.interrupted = True
    except KernelLimitError as error:
        raise BackendError(str(error)) from error
    return result


def _run(result: KernelResult, device: torch.device, progress: Progress) -> None:
    clock = clock_for(device, result.backend)
    progress("measuring the copy bandwidth", 0, 1)
    result.machine = {
        **describe_measured(device),
        "copy_gb_per_s": copy_gb_per_s(device, clock),
        "clock_floor_us": floor_us(device, clock),
    }
    variants = KernelVariants(result.settings, result.backend, device)
    result.notes += _notes(result, device)
    for variant in variants.build():
        progress(f"checking {variant.label}", len(result.measurements), 0)
        result.measurements.append(Measurement.of(variant))
    result.notes += variants.notes
    _time(result, clock, device, progress)


def _time(result: KernelResult, clock: CpuClock, device: torch.device, progress: Progress) -> None:
    calls: list[Callable[[], Any]] = []
    timed: list[Measurement] = []
    for one in result.measurements:
        if one.failure is not None:
            continue
        progress(f"warming up {one.variant.label}", len(timed), len(result.measurements))
        with one.noting():
            if result.backend == "triton":
                with counting(launched := Counter[str]()):
                    one.variant.call()
                one.launches = launched.total() or None
            calls.append(clock.prepare(one.variant.call))
            timed.append(one)
    repeats = result.settings.repeats or REPEATS[device.type]
    for repeat in range(repeats):
        progress("timing", repeat, repeats)
        try:
            for one, time_us in zip(timed, clock.time(calls), strict=True):
                one.times_us.append(time_us)
        except RuntimeError as error:  # CUDA does not tell which call failed
            result.stopped = reason(error)
            return
    progress("timing", repeats, repeats)


def _notes(result: KernelResult, device: torch.device) -> list[str]:
    notes = []
    if result.backend == "torch":
        notes += [
            f"the PyTorch backend on {device.type} was timed, not the Triton kernels",
            "dense.paper_like, dense.evidence and fast.gather are Triton kernels and need a CUDA device",
        ]
    else:
        notes.append("dense.paper_like: one split a request, tiles of 16 tokens, no evidence")
    if "recall" in result.settings.ops:
        notes.append(f"recall: one of {FETCHED_EVERY} selected rows comes from the host, the others are on the device")
    if result.settings.sweep:
        notes.append("the paper's Table 1 is over its own dense kernel, on a B200: 16K tokens, batch 16, bfloat16")
    return notes


def _check_fits(settings: KernelSettings, backend: str, device: torch.device) -> None:
    needed = forecast_bytes(settings, backend) + workspace_bytes(device)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryForecastError(
            f"the benchmark must fit {free / 1e9:.2f} GB of free memory, got a forecast of "
            f"{needed / 1e9:.2f} GB; lower --batch or --context"
        )
