"""An op or rival that the benchmark checks and times."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sfi_kernels.launch import KernelLimitError


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """An op or rival that is checked and timed.

    Attributes:
        name: The op of the row.
        retention: The share of the context that the op works on; None if it does not depend on one.
        call: Runs the op.
        bytes: The bytes that the op must move.
        error: Runs the op, and returns its error; above 1 the result is wrong.
        form: The form of the call, if there are several.
        flops: Multiplications and additions; None if bytes decide the time.
        shape: Values that replace the settings' shape in the row.
    """

    name: str
    retention: float | None
    call: Callable[[], Any]
    bytes: int
    error: Callable[[], float]
    form: str | None = None
    flops: int | None = None
    shape: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name with the retention."""
        at = "" if self.retention is None else f" at retention {self.retention:g}"
        return f"{self.name}{at}"


def reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def guarded(name: str, retention: float | None, variants: Iterable[KernelVariant]) -> Iterator[KernelVariant]:
    """Yield variants; if making one raises (but `KernelLimitError`), yield one that raises the same."""
    try:
        yield from variants
    except KernelLimitError:
        raise
    except Exception as error:  # noqa: BLE001 - compilers, drivers and rivals raise anything
        failure = error

        def again() -> float:
            raise failure

        yield KernelVariant(name, retention, again, 0, again)
