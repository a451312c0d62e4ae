"""One thing that the benchmark checks and times."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    """

    name: str
    retention: float | None
    call: Callable[[], Any]
    bytes: int
    error: Callable[[], float]
    form: str | None = None
