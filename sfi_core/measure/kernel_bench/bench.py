"""The run of the kernel benchmark: check every variant, then time all of them; a row for each."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.errors import BackendError, MemoryForecastError, NumericsError, unknown
from sfi_core.machine.memory import describe_measured, free_bytes
from sfi_core.machine.versions import versions
from sfi_core.measure.kernel_bench import timing
from sfi_core.measure.kernel_bench.cases import FETCHED_EVERY, groups
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.gates import KernelVariant, reason
from sfi_core.measure.kernel_bench.settings import REPEATS, KernelSettings
from sfi_core.measure.kernel_bench.timing import CpuClock, clock_for, copy_gb_per_s, floor_us, workspace_bytes
from sfi_core.settings.engine import BACKENDS
from sfi_kernels.launch import KernelLimitError, counting

SPEEDUPS = {
    "speedup_over_dense": "dense",
    "speedup_over_sdpa": "dense.sdpa",
    "speedup_over_paper_like": "dense.paper_like",
}
SHAPE = ("context", "batch", "heads", "kv_heads", "head_dim")  # columns of every row
Progress = Callable[[str, int, int], None]
OnGroup = Callable[[str, list[dict[str, Any]]], None]
Medians = dict[tuple[str, float | None], float | None]


class WrongResultError(NumericsError):
    """An op does not run, or differs from its formula by more than rounding; other ops were timed."""


@dataclass(slots=True)
class KernelResult:
    """The variants so far."""

    settings: KernelSettings
    backend: str  # "torch" or "triton"
    variants: list[KernelVariant] = field(default_factory=list)
    # the machine, its copy bandwidth and the time that the clock adds to a call
    machine: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # remarks that the rows need
    stopped: str | None = None  # the error that ended the timing early; None without an error
    interrupted: bool = False  # whether Ctrl-C ended the run early

    @property
    def failures(self) -> list[str]:
        """The variants that were not timed, and why; and why the timing stopped."""
        failed = [f"{variant.label} ({variant.failure})" for variant in self.variants if variant.failure]
        return failed + ([] if self.stopped is None else [f"timing ({self.stopped})"])

    def check(self) -> None:
        """Raise `WrongResultError` with all failures on one line, if there are any."""
        if self.failures:
            failures = "; ".join(self.failures)
            raise WrongResultError(f"every op must run and equal its formula up to rounding, got {failures}")

    def document(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        return {
            "rows": self.rows(),
            "compiled": [],
            "backend": self.backend,
            "interrupted": self.interrupted,
            "failures": self.failures,
            "notes": self.notes,
            "machine": self.machine,
            "versions": versions(),
        }

    def rows(self, shown: Sequence[KernelVariant] | None = None) -> list[dict[str, Any]]:
        """Return a row for each of `shown` (None: all) that was timed, of SDPA's two forms the faster, or failed."""
        shown = self.variants if shown is None else shown
        timed = [variant for variant in reversed(self.variants) if variant.times_us]
        timed.sort(key=lambda variant: variant.median_us or 0.0, reverse=True)
        best = {variant.row: variant for variant in timed}
        medians = {(variant.name, variant.retention): variant.median_us for variant in best.values()}
        failed = [variant for variant in shown if variant.failure and not variant.times_us]
        fastest = [variant for variant in shown if best.get(variant.row) is variant]
        return [self._row(variant, medians) for variant in [*fastest, *failed]]

    def _row(self, variant: KernelVariant, medians: Medians) -> dict[str, Any]:
        settings, times, median = self.settings, variant.times_us, variant.median_us
        gb_per_s = _ratio(variant.bytes, median, 1e3)
        attended = settings.attended(variant.retention or 1.0) if variant.name.startswith("fast") else None
        speedups = {name: _ratio(medians.get((op, 1.0)), median) for name, op in SPEEDUPS.items()}
        if variant.flops is not None:  # a prompt's piece is compared with its own rival, not with a decoding step
            rival = medians.get((f"{variant.name.removesuffix('.sdpa')}.sdpa", None))
            speedups = dict.fromkeys(SPEEDUPS) | {"speedup_over_sdpa": _ratio(rival, median)}
        return {
            "op": variant.name,
            "backend": self.backend,
            "retention": variant.retention,
            **{name: getattr(settings, name) for name in SHAPE},
            "dtype": settings.dtype_name,
            **variant.shape,
            "form": variant.form,
            "median_us": median,
            "p10_us": timing.percentile(times, 10) if times else None,
            "p90_us": timing.percentile(times, 90) if times else None,
            "repeats": len(times),
            "launches": variant.launches,
            "bytes": variant.bytes,
            "gb_per_s": gb_per_s,
            "bandwidth_share": _ratio(gb_per_s, self.machine["copy_gb_per_s"]),
            **speedups,
            "tflop_per_s": _ratio(variant.flops, median, 1e6),
            "attended_tokens": attended,
            "ideal_speedup": settings.context / attended if attended else None,
            # JSON has no infinity
            "error_share": variant.error_share if math.isfinite(variant.error_share or 0) else None,
            "matches_reference": variant.error_share is not None and variant.error_share <= 1,
            "failure": variant.failure,
        }


def _ratio(above: float | None, below: float | None, unit: float = 1) -> float | None:
    return None if above is None or below is None else above / below / unit


def resolve_backend(name: str, device: torch.device) -> str:
    """Pick the backend: Triton on CUDA, PyTorch elsewhere; raise `BackendError` for Triton elsewhere."""
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name == "triton" and device.type != "cuda":
        raise BackendError(
            f"backend triton must have a CUDA device to be timed, got {device.type}; time the PyTorch "
            "code with --backend torch, or check the kernels without a GPU with --compile-only"
        )
    return name


def run_bench(
    settings: KernelSettings,
    backend: str,
    device: torch.device,
    progress: Progress = lambda *_: None,
    on_group: OnGroup = lambda *_: None,
) -> KernelResult:
    """Check every variant, then time it; the variants of a group take turns.

    `progress` gets the phase, the calls done and their number; `on_group` each group's title and rows at once, after
    Ctrl-C those that are there. A variant that fails is noted (`KernelResult.check`). Raise `MemoryForecastError` if it
    does not fit, `BackendError` if a kernel does not take this shape.
    """
    needed, free = settings.forecast_bytes() + workspace_bytes(device), free_bytes(device)
    if free is not None and needed > free:
        raise MemoryForecastError(
            f"the benchmark must fit {free / 1e9:.2f} GB of free memory, got a forecast of "
            f"{needed / 1e9:.2f} GB; lower --batch or --context"
        )
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
    notes = ["dense.paper_like: one split a request, tiles of 16 tokens, no evidence"]
    if result.backend == "torch":
        notes = [
            f"the PyTorch backend on {device.type} was timed, not the Triton kernels",
            "dense.paper_like, .evidence, .host, append.host and fast.gather are Triton kernels and need a CUDA device",
        ]
    if "recall" in result.settings.ops:
        notes.append(f"recall: one of {FETCHED_EVERY} selected rows comes from the host, the others are on the device")
    if result.settings.sweep:
        notes.append("the paper's Table 1 is over its own dense kernel, on a B200: 16K tokens, batch 16, bfloat16")
    return notes
