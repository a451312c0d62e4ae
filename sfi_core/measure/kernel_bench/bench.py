"""The run of the kernel benchmark: check every variant, then time all of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from sfi_core.errors import BackendError, MemoryForecastError
from sfi_core.machine.memory import describe_measured, free_bytes
from sfi_core.measure.kernel_bench.cases import FETCHED_EVERY, groups
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.result import KernelResult, KernelVariant, reason
from sfi_core.measure.kernel_bench.settings import REPEATS, KernelSettings
from sfi_core.measure.kernel_bench.timing import CpuClock, clock_for, copy_gb_per_s, floor_us, workspace_bytes
from sfi_kernels.launch import KernelLimitError, counting

Progress = Callable[[str, int, int], None]
OnGroup = Callable[[str, list[dict[str, Any]]], None]


def run_bench(
    settings: KernelSettings,
    backend: str,
    device: torch.device,
    progress: Progress = lambda *_: None,
    on_group: OnGroup = lambda *_: None,
) -> KernelResult:
    """Check every variant, then time it; the variants of a group take turns.

    `progress` gets the phase, the calls done and the number of calls; `on_group` each group's title and rows as soon
    as they are there, after Ctrl-C those that are. A variant that fails is noted and not timed; see
    `KernelResult.check`.

    Raises:
        MemoryForecastError: The inputs and their checks do not fit into memory.
        BackendError: A kernel does not take this shape.
    """
    _check_fits(settings, device)
    result = KernelResult(settings, backend)
    try:
        _run(result, device, progress, on_group)
    except KeyboardInterrupt:
        result.interrupted = True
    except KernelLimitError as error:
        raise BackendError(str(error)) from error
    return result


def _run(result: KernelResult, device: torch.device, progress: Progress, on_group: OnGroup) -> None:
    clock = clock_for(device, result.backend)
    progress("measuring the copy bandwidth", 0, 1)
    result.machine |= describe_measured(device)
    result.machine |= {"copy_gb_per_s": copy_gb_per_s(device, clock), "clock_floor_us": floor_us(device, clock)}
    layer = LayerData(result.settings, result.backend, device)
    result.notes += _notes(result, device)
    repeats = result.settings.repeats or REPEATS[device.type]
    for title, group in groups(layer):
        before = len(result.variants)
        try:
            for variant in group:
                result.variants.append(variant)
                progress(f"checked {variant.label}", len(result.variants) - before, 0)
            _time(result, title, result.variants[before:], clock, repeats, progress)
        finally:
            if rows := result.rows(result.variants[before:]):
                on_group(title, rows)
        if result.stopped is not None:
            break
    result.notes += layer.notes


def _time(
    result: KernelResult, title: str, group: list[KernelVariant], clock: CpuClock, repeats: int, progress: Progress
) -> None:
    calls: list[Callable[[], Any]] = []
    timed: list[KernelVariant] = []
    for variant in group:
        if variant.failure is not None:
            continue
        progress(f"warming up {variant.label}", len(timed), len(group))
        with variant.failing():
            if result.backend == "triton":
                with counting(launched := Counter[str]()):
                    variant.call()
                variant.launches = launched.total() or None
            calls.append(clock.prepare(variant.call))
            timed.append(variant)
    for repeat in range(repeats):
        progress(f"timing {title.lower()}", repeat, repeats)
        try:
            for variant, time_us in zip(timed, clock.time(calls), strict=True):
                variant.times_us.append(time_us)
        except RuntimeError as error:  # CUDA does not tell which call failed
            result.stopped = reason(error)
            return


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


def _check_fits(settings: KernelSettings, device: torch.device) -> None:
    needed = settings.forecast_bytes() + workspace_bytes(device)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryForecastError(
            f"the benchmark must fit {free / 1e9:.2f} GB of free memory, got a forecast of "
            f"{needed / 1e9:.2f} GB; lower --batch or --context"
        )
