"""The variants that the kernel benchmark checks and times, and its result: a row for each."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfi_core.errors import NumericsError
from sfi_core.machine.versions import versions
from sfi_core.measure.kernel_bench.settings import KernelSettings
from sfi_core.measure.kernel_bench.timing import percentile
from sfi_kernels.launch import KernelLimitError


@dataclass(slots=True, eq=False)
class KernelVariant:
    """An op or rival that is checked and timed, and what came of that."""

    name: str  # the op of the row
    retention: float | None  # the share of the context that the op works on; None if it does not depend on one
    call: Callable[[], Any]  # runs the op
    bytes: int  # the bytes that the op must move
    error: Callable[[], float]  # runs the op, and returns its error; above 1 the result is wrong
    form: str | None = None  # the form of the call, if there are several
    flops: int | None = None  # multiplications and additions; None if bytes decide the time
    shape: Mapping[str, int] = field(default_factory=dict)  # values that replace the settings' shape in the row
    error_share: float | None = None  # the error, a share of what rounding allows; None if the variant did not run
    failure: str | None = None  # why the variant is not timed; None if it is
    launches: int | None = None  # kernels that a call launches; None where Triton launches none
    times_us: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name with the retention."""
        at = "" if self.retention is None else f" at retention {self.retention:g}"
        return f"{self.name}{at}"

    @property
    def row(self) -> tuple[str, float | None, str | None]:
        """What its row is of: SDPA's forms share one."""
        return self.name, self.retention, None if self.name == "dense.sdpa" else self.form

    @property
    def median_us(self) -> float | None:
        """The median time; None without times."""
        return statistics.median(self.times_us) if self.times_us else None

    def check(self) -> None:
        """Compare the result; an exception but `KernelLimitError` becomes the failure."""
        with self.failing():
            self.error_share = self.error()
            if not self.error_share <= 1:
                self.failure = f"{self.error_share:.3g} times the error that rounding allows"

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Take an exception as the failure; a `KernelLimitError` is raised, as no variant would run."""
        try:
            yield
        except KernelLimitError:
            raise
        except Exception as error:  # noqa: BLE001 - compilers, drivers and rivals raise anything
            self.failure = reason(error)


def reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def checked(name: str, retention: float | None, variants: Iterable[KernelVariant]) -> Iterator[KernelVariant]:
    """Yield variants after their checks; if making one raises, the last is one of that name that failed."""
    unmade = KernelVariant(name, retention, lambda: None, 0, lambda: 0.0)
    with unmade.failing():
        for variant in variants:
            variant.check()
            yield variant
    if unmade.failure:
        yield unmade


SPEEDUPS = {
    "speedup_over_dense": "dense",
    "speedup_over_sdpa": "dense.sdpa",
    "speedup_over_paper_like": "dense.paper_like",
}
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
        """Return a row for every variant that was timed (of SDPA's two forms the faster) or failed.

        `shown` are the variants to return, by default all.
        """
        timed = [variant for variant in reversed(self.variants) if variant.times_us]
        timed.sort(key=lambda variant: statistics.median(variant.times_us), reverse=True)
        best = {variant.row: variant for variant in timed}
        medians = {(variant.name, variant.retention): variant.median_us for variant in best.values()}
        asked = self.variants if shown is None else shown
        failed = [variant for variant in asked if variant.failure and not variant.times_us]
        fastest = [variant for variant in asked if best.get(variant.row) is variant]
        return [self._row(variant, medians) for variant in [*fastest, *failed]]

    def _row(self, variant: KernelVariant, medians: Medians) -> dict[str, Any]:
        retention, times, median = variant.retention, variant.times_us, variant.median_us
        gb_per_s = _ratio(variant.bytes, median, 1e3)
        attended = self.settings.attended(retention or 1.0) if variant.name.startswith("fast") else None
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
            "launches": variant.launches,
            "bytes": variant.bytes,
            "gb_per_s": gb_per_s,
            "bandwidth_share": _ratio(gb_per_s, self.machine["copy_gb_per_s"]),
            **_speed_ups(variant, median, medians),
            "tflop_per_s": _ratio(variant.flops, median, 1e6),
            "attended_tokens": attended,
            "ideal_speedup": self.settings.context / attended if attended else None,
            "gather_us": medians.get(("fast.gather", retention)) if variant.name == "fast" else None,
            # JSON has no infinity
            "error_share": variant.error_share if math.isfinite(variant.error_share or 0) else None,
            "matches_reference": variant.error_share is not None and variant.error_share <= 1,
            "failure": variant.failure,
        }


def _speed_ups(variant: KernelVariant, median: float | None, medians: Medians) -> dict[str, float | None]:
    if variant.flops is None:
        return {name: _ratio(medians.get((op, 1.0)), median) for name, op in SPEEDUPS.items()}
    # a prompt's piece is compared with its own rival, not with a decoding step
    own = medians.get((f"{variant.name.removesuffix('.sdpa')}.sdpa", None))
    return dict.fromkeys(SPEEDUPS) | {"speedup_over_sdpa": _ratio(own, median)}


def _ratio(above: float | None, below: float | None, unit: float = 1) -> float | None:
    return None if above is None or below is None else above / below / unit
