"""One thing that the benchmark checks and times."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sfi_kernels.launch import KernelLimitError


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One thing that is checked and timed.

    Attributes:
        name: The op of the row.
        retention: The share of the context that the op works on; None where that does not apply.
        call: Runs the op.
        bytes: The bytes that the op must move.
        error: Runs the op and compares; above 1 the result is wrong.
        form: The form of the call, where there are several.
        flops: Its multiplications and additions; None where bytes decide.
        shape: What of the settings does not hold for it.
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
        """The name, with the retention that it works on."""
        at = "" if self.retention is None else f" at retention {self.retention:g}"
        return f"{self.name}{at}"

    @contextmanager
    def noting(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Tell what is raised inside, on one line, and go on.

        Raises:
            KernelLimitError: The kernels do not take this shape, which no variant can mend.
        """
        try:
            yield
        except KernelLimitError:
            raise
        except Exception as error:  # noqa: BLE001 - a compiler, a driver and a rival raise what they like
            tell(reason(error))


def reason(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return ": ".join([type(error).__name__, *lines[:1]])


def guarded(
    name: str, retention: float | None, variants: Iterable[KernelVariant]
) -> Iterator[KernelVariant]:
    """Yield variants; where making the next one raises, a variant in its place that raises the same.

    Raises:
        KernelLimitError: The kernels do not take this shape.
    """
    try:
        yield from variants
    except KernelLimitError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        yield _broken(name, retention, error)


def alone(make: Callable[..., KernelVariant], *operands: Any) -> Iterator[KernelVariant]:
    """Yield one variant, made when it is asked for."""
    yield make(*operands)


def _broken(name: str, retention: float | None, error: Exception) -> KernelVariant:
    def again() -> float:
        raise error

    return KernelVariant(name, retention, again, 0, again)
