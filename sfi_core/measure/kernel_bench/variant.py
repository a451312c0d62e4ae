"""One thing that the benchmark checks and times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
