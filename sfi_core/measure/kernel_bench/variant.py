"""An op or rival that the benchmark checks and times."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfi_kernels.launch import KernelLimitError


@dataclass(slots=True, eq=False)
class KernelVariant:
    """An op or rival that is checked and timed, and what came of that.

    Attributes:
        name: The op of the row.
        retention: The share of the context that the op works on; None if it does not depend on one.
        call: Runs the op.
        bytes: The bytes that the op must move.
        error: Runs the op, and returns its error; above 1 the result is wrong.
        form: The form of the call, if there are several.
        flops: Multiplications and additions; None if bytes decide the time.
        shape: Values that replace the settings' shape in the row.
        error_share: The error, a share of what rounding allows; None if the variant did not run.
        failure: Why the variant is not timed; None if it is.
        launches: Kernels that a call launches; None where Triton launches none.
    """

    name: str
    retention: float | None
    call: Callable[[], Any]
    bytes: int
    error: Callable[[], float]
    form: str | None = None
    flops: int | None = None
    shape: Mapping[str, int] = field(default_factory=dict)
    error_share: float | None = None
    failure: str | None = None
    launches: int | None = None
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
