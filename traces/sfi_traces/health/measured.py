"""Values that health rules measure."""

from dataclasses import dataclass

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


def worse_of_beginning(value: str) -> str:
    """Write the SQL of a mean over all rows, or over the first rows by `place` if that is larger.

    A run that went wrong often ends in repetition, which is easy to predict: its errors are at the beginning,
    and a mean over the run hides them.
    """
    return f"greatest(avg({value}), avg({value}) FILTER (place <= {BEGINNING}))"


def measured(scope: Scope, query: str) -> list[Measured]:
    """Run a query and convert its rows; a null value becomes 0."""
    return [
        Measured(
            row["request"], row.get("layer"), row.get("head"), float(row["value"] or 0), row["n"]
        )
        for row in scope.rows(query)
    ]
