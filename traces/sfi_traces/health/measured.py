"""Values that health rules measure."""

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from sfi_traces.model.request import Request
from sfi_traces.schema import KEY

BEGINNING = 32  # fast steps
SAMPLED = "sampled_selections"
MOST_POSITIONS = 1 << 22  # read at once
RECORD_AUDIT = "record a sparse policy with --audit N"
RECORD_POSITIONS = "record a policy that selects with --set trace.positions=true"
RECORD_SELECTOR = "only a policy with the Selector, such as sfi, has its evidence"
# replaces these for an imported trace
IMPORTED = "the imported file does not hold what this rule looks at"
RECORD = (RECORD_AUDIT, RECORD_POSITIONS, RECORD_SELECTOR)
AT_CLIP = 1e-6  # of selector.lambda_clip: how near lambda*, a float32, is to a clip that it stands at


Measure = Callable[[Request], "list[Measured]"]


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


def by_head(request: Request, value: str, source: str, samples: str = "count(*)") -> list[Measured]:
    """Measure the SQL `value` of each KV head's rows of `source`; `samples` counts those behind it."""
    return measured(
        request,
        f"""
        SELECT request, layer, head, {samples} AS n, {value} AS value
        FROM {source} GROUP BY request, layer, head
        """,  # noqa: S608 - our own words
    )


def measured(request: Request, query: str) -> list[Measured]:
    """Run a query and convert its rows; a null value becomes 0."""
    return [
        Measured(
            row["request"], row.get("layer"), row.get("head"), float(row["value"] or 0), row["n"], row.get("whole")
        )
        for row in request.query(query)
    ]


def sample_selections(request: Request) -> int:
    """Make the view `sampled_selections`, with positions, of every n-th refresh of a request; return n.

    The view `sampled_refreshes` includes selections without positions.
    """
    size = request.single("SELECT coalesce(sum(selected), 0) AS positions FROM chosen_selections")
    every = 1 + int(size["positions"]) // MOST_POSITIONS
    if SAMPLED in request.shared:
        return every
    picked = request.query(f"""
        SELECT request, step FROM (SELECT DISTINCT request, step FROM chosen_selections)
        QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
    """)  # noqa: S608 - a number
    keys = {name: [row[name] for row in picked] for name in ("request", "step")}
    request.pick("sampled_refreshes", "selections", pa.table(keys, pa.schema(KEY)))
    request.connection.execute("""
        CREATE OR REPLACE TEMP VIEW sampled_selections AS
        SELECT * FROM sampled_refreshes WHERE positions IS NOT NULL
    """)
    request.shared[SAMPLED] = True
    return every


def sample_supports(request: Request) -> None:
    """Make the view `sampled_supports`: rows with `read` of every n-th audited fast step, with `position`."""
    size = request.single("SELECT count(*) AS rows FROM chosen_supports WHERE read IS NOT NULL")
    top = int((request.trace.manifest.get("audit") or {}).get("top", 1))
    every = 1 + int(size["rows"]) * top // MOST_POSITIONS
    request.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW sampled_supports AS
        SELECT * FROM chosen_supports JOIN (
            SELECT request, step, position FROM chosen_steps WHERE audited AND NOT slow
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
        ) USING (request, step)
        WHERE read IS NOT NULL
    """)  # noqa: S608 - a number


def at_clip(request: Request) -> str:
    """Write the SQL condition that a selection's lambda* is at its upper bound, `selector.lambda_clip`."""
    clip = f"{request.trace.manifest['config']['selector']['lambda_clip']!r}::DOUBLE"
    return f"(abs(lambda_star - {clip}) <= {AT_CLIP} * {clip})"
