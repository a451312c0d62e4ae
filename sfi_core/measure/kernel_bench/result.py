"""The result of the kernel benchmark: a row for each variant that was timed or failed."""

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfi_core.errors import NumericsError
from sfi_core.machine.versions import versions
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.timing import percentile
from sfi_core.measure.kernel_bench.variant import KernelVariant, reason
from sfi_kernels.launch import KernelLimitError

SPEEDUPS = {
    "speedup_over_dense": "dense",
    "speedup_over_sdpa": "dense.sdpa",
    "speedup_over_paper_like": "dense.paper_like",
    "speedup_over_flashinfer": "dense.flashinfer",
    "speedup_over_flash_attn": "dense.flash_attn",
}


class WrongResultError(NumericsError):
    """An op does not run, or differs from its formula by more than rounding; other ops were timed."""


@dataclass(slots=True)
class Measurement:
    """A variant, its error and its times.

    Attributes:
        error: The error as a share of what rounding allows; None if the variant did not run.
        failure: Why the variant is not timed; None if it is.
        launches: Kernels that a call launches; None where Triton launches none.
    """

    variant: KernelVariant
    error: float | None = None
    failure: str | None = None
    launches: int | None = None
    times_us: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, variant: KernelVariant) -> "Measurement":
        """Check a variant; an exception but `KernelLimitError` becomes its failure."""
        one = cls(variant)
        with one.noting():
            one.error = variant.error()
            if not one.error <= 1:
                one.failure = f"{one.error:.3g} times the error that rounding allows"
        return one

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Take an exception as the failure; a `KernelLimitError` is raised, as no variant would run."""
        try:
            yield
        except KernelLimitError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers, drivers and rivals raise anything
            self.failure = reason(error)

    @property
    def median_us(self) -> float | None:
        """The median time; None without times."""
        return statistics.median(self.times_us) if self.times_us else None


@dataclass(slots=True)
class KernelResult:
    """The measurements so far.

    Attributes:
        backend: "torch" or "triton".
        machine: The machine, its copy bandwidth and the time that the clock adds to a call.
        notes: Remarks that the rows need.
        stopped: The error that ended the timing early; None without an error.
        interrupted: Whether Ctrl-C ended the run early.
    """

    settings: KernelSettings
    backend: str
    measurements: list[Measurement] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stopped: str | None = None
    interrupted: bool = False

    @property
    def failures(self) -> list[str]:
        """The variants that were not timed, and why; and why the timing stopped."""
        failed = [f"{one.variant.label} ({one.failure})" for one in self.measurements if one.failure]
        return failed + ([] if self.stopped is None else [f"timing ({self.stopped})"])

    def check(self) -> None:
        """Raise `WrongResultError` with all failures on one line, if there are any."""
        if self.failures:
            raise WrongResultError(
                "every op must run and equal its formula up to rounding, got " + "; ".join(self.failures)
            )

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

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every variant that was timed (of SDPA's two forms the faster) or failed."""
        timed: dict[tuple[str, float | None], Measurement] = {}
        medians: dict[tuple[str, float | None], float] = {}
        for one in self.measurements:
            key, median = (one.variant.name, one.variant.retention), one.median_us
            if median is not None and median < medians.get(key, math.inf):
                timed[key], medians[key] = one, median
        failed = [one for one in self.measurements if one.failure and not one.times_us]
        return [self._row(one, medians) for one in [*timed.values(), *failed]]

    def _row(self, one: Measurement, medians: dict[tuple[str, float | None], float]) -> dict[str, Any]:
        variant, retention, times = one.variant, one.variant.retention, one.times_us
        median = one.median_us
        gb_per_s = _ratio(variant.bytes, median, 1e3)
        attended = None
        if variant.name.startswith("fast"):
            attended = self.settings.attended(retention or 1.0)
        return {
            "op": variant.name,
            "backend": self.backend,
            "retention": retention,
            **self.settings.shown(),
            **variant.shape,
            "form": variant.form,
            "median_us": median,
            "p10_us": percentile(times, 10) if times else None,
            "p90_us": percentile(times, 90) if times else None,
            "repeats": len(times),
            "launches": one.launches,
            "bytes": variant.bytes,
            "gb_per_s": gb_per_s,
            "bandwidth_share": _ratio(gb_per_s, self.machine["copy_gb_per_s"]),
            **_speed_ups(variant, median, medians),
            "tflop_per_s": _ratio(variant.flops, median, 1e6),
            "attended_tokens": attended,
            "ideal_speedup": self.settings.context / attended if attended else None,
            "gather_us": medians.get(("fast.gather", retention)) if variant.name == "fast" else None,
            # JSON has no infinity
            "error_share": one.error if one.error is not None and math.isfinite(one.error) else None,
            "matches_reference": one.error is not None and one.error <= 1,
            "failure": one.failure,
        }


def _speed_ups(
    variant: KernelVariant, median: float | None, medians: dict[tuple[str, float | None], float]
) -> dict[str, float | None]:
    if variant.flops is None:
        return {name: _ratio(medians.get((op, 1.0)), median) for name, op in SPEEDUPS.items()}
    # a prompt's piece is compared with its own rival, not with a decoding step
    own = medians.get((f"{variant.name.removesuffix('.sdpa')}.sdpa", None))
    return dict.fromkeys(SPEEDUPS) | {"speedup_over_sdpa": _ratio(own, median)}


def _ratio(above: float | None, below: float | None, unit: float = 1) -> float | None:
    return None if above is None or below is None else above / below / unit
