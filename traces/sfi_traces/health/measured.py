"""What a health rule measures, and why it may measure nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sfi_traces.summary.scope import Scope

BEGINNING = 32  # fast steps


class Unjudged(Exception):  # noqa: N818 - no error: a rule that does not apply
    """A rule does not apply to this run, for the reason in its text."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value.

    Attributes:
        request: The request.
        layer: The layer; None for what is not a layer's.
        head: The KV head; None for what is not a head's.
        value: The value.
        n: Samples behind it.
    """

    request: int
    layer: int | None
    head: int | None
    value: float
    n: int

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Self:
        """Take a row of a query; null counts as 0."""
        value = 0.0 if row["value"] is None else float(row["value"])
        return cls(row["request"], row.get("layer"), row.get("head"), value, row["n"])


def worse_of_beginning(value: str) -> str:
    """Write the SQL of a mean over all rows, or over the first by `place` if that is larger.

    A run that has gone wrong soon repeats itself, and what repeats itself is easy: the errors stand at the
    beginning, and a mean over the run hides them.
    """
    return f"greatest(avg({value}), avg({value}) FILTER (place <= {BEGINNING}))"


def measured(scope: Scope, query: str, parameters: list[Any] | None = None) -> list[Measured]:
    """Take the rows of a query."""
    return [Measured.of(row) for row in scope.rows(query, parameters)]
