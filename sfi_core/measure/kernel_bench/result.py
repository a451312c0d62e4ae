"""The result of the kernel benchmark: a row for each variant that was timed or failed."""

import math
from dataclasses import dataclass, field
from typing import Any

from sfi_core.errors import NumericsError
from sfi_core.machine.versions import versions
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.timing import KernelTimes
from sfi_core.measure.kernel_bench.variant import KernelVariant

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
    """

    variant: KernelVariant
    error: float | None = None
    failure: str | None = None
    times: KernelTimes = field(default_factory=KernelTimes)

    @classmethod
    def of(cls, variant: KernelVariant) -> "Measurement":
        """Check a variant; an exception becomes its failure.

        Raises:
            KernelLimitError: The kernels do not take this shape.
        """
        one = cls(variant)
        with variant.noting(one.fail):
            one.error = variant.error()
            if not one.error <= 1:
                one.failure = f"{one.error:.3g} times the error that rounding allows"
        return one

    def fail(self, reason: str) -> None:
        """Note why the variant is not timed."""
        self.failure = reason


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
        failed = [
            f"{one.variant.label} ({one.failure})" for one in self.measurements if one.failure
        ]
        return failed + ([] if self.stopped is None else [f"timing ({self.stopped})"])

    def check(self) -> None:
        """Raise `WrongResultError` with all failures on one line, if there are any."""
        if self.failures:
            raise WrongResultError(
                "every op must run and equal its formula up to rounding, got "
                + "; ".join(self.failures)
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
        for one in self.measurements:
            key = one.variant.name, one.variant.retention
            if one.times.times_us and (
                key not in timed or one.times.median_us < timed[key].times.median_us
            ):
                timed[key] = one
        medians = {key: one.times.median_us for key, one in timed.items()}
        failed = [one for one in self.measurements if one.failure and not one.times.times_us]
        return [self._row(one, medians) for one in [*timed.values(), *failed]]

    def _row(
        self, one: Measurement, medians: dict[tuple[str, float | None], float]
    ) -> dict[str, Any]:
        variant, retention = one.variant, one.variant.retention
        row = {
            "op": variant.name,
            "backend": self.backend,
            "retention": retention,
            **self.settings.shown(),
            **variant.shape,
            "form": variant.form,
            **self._times(one, medians),
        }
        is_fast = variant.name.startswith("fast")
        attended = self.settings.attended(retention or 1.0) if is_fast else None
        row["attended_tokens"] = attended
        row["ideal_speedup"] = self.settings.context / attended if attended else None
        row["gather_us"] = (
            medians.get(("fast.gather", retention)) if variant.name == "fast" else None
        )
        # JSON has no infinity
        row["error_share"] = (
            one.error if one.error is not None and math.isfinite(one.error) else None
        )
        row["matches_reference"] = one.error is not None and one.error <= 1
        row["failure"] = one.failure
        return row

    def _times(
        self, one: Measurement, medians: dict[tuple[str, float | None], float]
    ) -> dict[str, Any]:
        times, moved = one.times, one.variant.bytes
        median = times.median_us if times.times_us else None
        gb_per_s = None if median is None else moved / median / 1e3
        row: dict[str, Any] = {
            "median_us": median,
            "p10_us": None if median is None else times.percentile_us(10),
            "p90_us": None if median is None else times.percentile_us(90),
            "repeats": len(times.times_us),
            "bytes": moved,
            "gb_per_s": gb_per_s,
            "bandwidth_share": None
            if gb_per_s is None
            else gb_per_s / self.machine["copy_gb_per_s"],
        }
        return row | self._speeds(one.variant, median, medians)

    def _speeds(
        self,
        variant: KernelVariant,
        median: float | None,
        medians: dict[tuple[str, float | None], float],
    ) -> dict[str, float | None]:
        # a prompt's piece is compared with its own rival, not with a decoding step
        prompt = variant.flops is not None
        row: dict[str, float | None] = {}
        for name, op in SPEEDUPS.items():
            dense = None if prompt else medians.get((op, 1.0))
            row[name] = None if dense is None or median is None else dense / median
        own = medians.get((f"{variant.name.removesuffix('.sdpa')}.sdpa", None)) if prompt else None
        if own is not None and median is not None:
            row["speedup_over_sdpa"] = own / median
        row["tflop_per_s"] = (
            None if variant.flops is None or median is None else variant.flops / median / 1e6
        )
        return row
