"""The benchmark's run: check everything, then time everything, then make the rows."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from sfi_core.errors import BackendError, MemoryForecastError, NumericsError
from sfi_core.machine.describe import describe_measured
from sfi_core.machine.memory import free_bytes
from sfi_core.machine.versions import versions
from sfi_core.measure.kernel_bench.bytes_moved import forecast_bytes
from sfi_core.measure.kernel_bench.recall_variant import FETCHED_EVERY
from sfi_core.measure.kernel_bench.settings import CODE_OPS, REPEATS, KernelSettings
from sfi_core.measure.kernel_bench.timing import (
    KernelTimes,
    clock_for,
    copy_gb_per_s,
    floor_us,
    workspace_bytes,
)
from sfi_core.measure.kernel_bench.variant import KernelVariant
from sfi_core.measure.kernel_bench.variants import KernelVariants
from sfi_kernels.launch import KernelLimitError

SPEEDUPS = {
    "speedup_over_dense": "dense",
    "speedup_over_sdpa": "dense.sdpa",
    "speedup_over_paper_like": "dense.paper_like",
    "speedup_over_flashinfer": "dense.flashinfer",
    "speedup_over_flash_attn": "dense.flash_attn",
}
Progress = Callable[[str, int, int], None]


class WrongResultError(NumericsError):
    """An op differs from its formula by more than rounding; nothing was timed."""


@dataclass(slots=True)
class Measurement:
    """A variant, its error and its times."""

    variant: KernelVariant
    error: float
    times: KernelTimes = field(default_factory=KernelTimes)


@dataclass(slots=True)
class KernelResult:
    """The measurements so far.

    Attributes:
        settings: The settings of the run.
        backend: "torch" or "triton".
        measurements: The measurement of every variant.
        machine: The machine, its copy bandwidth and what the clock adds.
        notes: What a reader of the rows must know.
        interrupted: Whether Ctrl-C ended it early.
    """

    settings: KernelSettings
    backend: str
    measurements: list[Measurement] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "rows": self.rows(),
            "compiled": [],
            "backend": self.backend,
            "interrupted": self.interrupted,
            "notes": self.notes,
            "machine": self.machine,
            "versions": versions(),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every variant that was timed; PyTorch's SDPA counts in its faster form."""
        timed: dict[tuple[str, float | None], Measurement] = {}
        for one in self.measurements:
            key = one.variant.name, one.variant.retention
            if one.times.times_us and (
                key not in timed or one.times.median_us < timed[key].times.median_us
            ):
                timed[key] = one
        medians = {key: one.times.median_us for key, one in timed.items()}
        return [self._row(one, medians) for one in timed.values()]

    def _row(
        self, one: Measurement, medians: dict[tuple[str, float | None], float]
    ) -> dict[str, Any]:
        variant, median = one.variant, one.times.median_us
        gb_per_s = variant.bytes / median / 1e3
        row = {
            "op": variant.name,
            "backend": self.backend,
            "retention": variant.retention,
            **self.settings.shown(),
            **variant.shape,
            "form": variant.form,
            "median_us": median,
            "p10_us": one.times.percentile_us(10),
            "p90_us": one.times.percentile_us(90),
            "repeats": len(one.times.times_us),
            "bytes": variant.bytes,
            "gb_per_s": gb_per_s,
            "bandwidth_share": gb_per_s / self.machine["copy_gb_per_s"],
            "tflop_per_s": None if variant.flops is None else variant.flops / median / 1e6,
        }
        for name, op in SPEEDUPS.items():
            dense = medians.get((op, 1.0)) if variant.flops is None else None
            row[name] = None if dense is None else dense / median
        own = medians.get((f"{variant.name.removesuffix('.sdpa')}.sdpa", None))
        if variant.flops is not None and own is not None:
            row["speedup_over_sdpa"] = own / median
        is_fast = variant.name.startswith("fast")
        attended = self.settings.attended(variant.retention or 1.0) if is_fast else None
        row["attended_tokens"] = attended
        row["ideal_speedup"] = self.settings.context / attended if attended else None
        row["gather_us"] = (
            medians.get(("fast.gather", variant.retention)) if variant.name == "fast" else None
        )
        row["error_share"] = one.error
        row["matches_reference"] = one.error <= 1
        return row


def run_bench(
    settings: KernelSettings,
    backend: str,
    device: torch.device,
    progress: Progress = lambda *_: None,
) -> KernelResult:
    """Check every variant, then time all of them in turn.

    Args:
        settings: What to measure.
        backend: "torch" or "triton"; see `resolve_backend`.
        device: The device that is measured.
        progress: Called with the phase, how many calls of the phase are done, and of how many.

    Raises:
        MemoryForecastError: The inputs and their checks do not fit.
        BackendError: A kernel does not take this shape.
        WrongResultError: A variant differs from its formula; nothing was timed.
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
        progress(f"checking {_name(variant)}", len(result.measurements), 0)
        error = variant.error()
        if not error <= 1:
            raise WrongResultError(
                f"{_name(variant)} must equal its formula up to rounding, got {error:.3g} times the "
                "error that rounding allows; nothing was timed"
            )
        result.measurements.append(Measurement(variant, error))
    result.notes += variants.notes
    calls: list[Callable[[], Any]] = []
    for one in result.measurements:
        progress(f"warming up {_name(one.variant)}", len(calls), len(result.measurements))
        calls.append(clock.prepare(one.variant.call))
    repeats = result.settings.repeats or REPEATS[device.type]
    for repeat in range(repeats):
        progress("timing", repeat, repeats)
        for one, time_us in zip(result.measurements, clock.time(calls), strict=True):
            one.times.times_us.append(time_us)
    progress("timing", repeats, repeats)


def _name(variant: KernelVariant) -> str:
    at = "" if variant.retention is None else f" at retention {variant.retention:g}"
    return f"{variant.name}{at}"


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
        notes.append(
            f"recall: one of {FETCHED_EVERY} selected rows comes from the host, the others are on the device"
        )
    if CODE_OPS & set(result.settings.ops):
        notes.append(
            "encode_keys codes every cached key; it and scan_codes run once for each request"
        )
    if result.settings.sweep:
        notes.append(
            "the paper's Table 1 is over its own dense kernel, on a B200: 16K tokens, batch 16, bfloat16"
        )
    return notes


def _check_fits(settings: KernelSettings, backend: str, device: torch.device) -> None:
    needed = forecast_bytes(settings, backend) + workspace_bytes(device)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryForecastError(
            f"the benchmark must fit {free / 1e9:.2f} GB of free memory, got a forecast of "
            f"{needed / 1e9:.2f} GB; lower --batch or --context"
        )
