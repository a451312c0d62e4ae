"""Values that health rules measure."""

from dataclasses import dataclass

from sfi_traces.summary.scope import Scope

BEGINNING = 32  # fast steps


class Unjudged(Exception):  # noqa: N818 - no error: a rule that does not apply
    """Raised where a rule does not apply to a run; the text says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of a rule, of `n` samples; layer and head are None for a value of all.

    `whole` is the value of all samples, where `value` may be that of the first `BEGINNING`; else None.
    """

    request: int
    layer: int | None
    head: int | None
    value: float
    n: int
    whole: float | None = None

    @property
    def of_beginning(self) -> bool:
        """Whether the value is that of the first samples alone."""
        return self.whole is not None and self.value > self.whole


def worse_of_beginning(value: str) -> str:
    """Write the SQL of a mean over all rows as column `whole`, then of that over the first rows if it is larger.

    A run that went wrong often ends in repetition, which is easy to predict and hides errors at the
    beginning.
    """
    return f"avg({value}) AS whole, greatest(avg({value}), avg({value}) FILTER (place <= {BEGINNING}))"


def by_head(scope: Scope, value: str, source: str, samples: str = "count(*)") -> list[Measured]:
    """Measure the SQL `value` of each KV head's rows of `source`; `samples` counts those behind it."""
    return measured(
        scope,
        f"""
        SELECT request, layer, head, {samples} AS n, {value} AS value
        FROM {source} GROUP BY request, layer, head
        """,  # noqa: S608 - our own words
    )


def measured(scope: Scope, query: str) -> list[Measured]:
    """Run a query and convert its rows; a null value becomes 0."""
    return [
        Measured(
            row["request"], row.get("layer"), row.get("head"), float(row["value"] or 0), row["n"], row.get("whole")
        )
        for row in scope.rows(query)
    ]
