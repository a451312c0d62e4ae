"""Values that health rules measure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sfi_traces.summary.scope import Scope

BEGINNING = 32  # fast steps


class Unjudged(Exception):  # noqa: N818 - no error: a rule that does not apply
    """Raised where a rule does not apply to a run; the text says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of a rule; `n` counts the samples behind it.

    Attributes:
        layer: None for a value of all layers.
        head: The KV head; None for a value of all heads.
    """

    request: int
    layer: int | None
    head: int | None
    value: float
    n: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Convert a row of a query; null becomes 0."""
        value = 0.0 if row["value"] is None else float(row["value"])
        return cls(row["request"], row.get("layer"), row.get("head"), value, row["n"])


def worse_of_beginning(value: str) -> str:
    """Write the SQL of a mean over all rows, or over the first rows by `place` if that is larger.

    A run that went wrong often ends in repetition, which is easy to predict: its errors are at the beginning,
    and a mean over the run hides them.
    """
    return f"greatest(avg({value}), avg({value}) FILTER (place <= {BEGINNING}))"


def measured(scope: Scope, query: str, parameters: list[Any] | None = None) -> list[Measured]:
    """Run a query and convert its rows."""
    return [Measured.of(row) for row in scope.rows(query, parameters)]
