"""What health rules measure of the table `supports`: what dense attention would have read, of fast steps."""

from sfi_traces.health.measured import Measured, worse_of_beginning
from sfi_traces.health.selection_measures import SINKS
from sfi_traces.summary.sampled import sample_supports
from sfi_traces.summary.scope import Scope

PEAK = 0.05  # the largest probability of a support that stands out
INTERVALS, STEPS, FEWEST = (
    8,
    16,
    4,
)  # between refreshes, audited fast steps of each, and how many it needs


def sink_unread(scope: Scope) -> list[Measured]:
    """Dense mass of the first positions that the step did not read; the mean over sampled steps."""
    return _lost(scope, f"p < {SINKS}")


def look_back(scope: Scope) -> list[Measured]:
    """Unread dense mass further back than any selected or recent token; the mean over sampled steps.

    The four earliest positions of a selection are left aside: a foreign engine's hold the sinks.
    """
    recent = int(scope.trace.manifest["config"].get("recent") or 0)
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW reach AS
        SELECT request, layer, head, max(position - coalesce(positions[{SINKS + 1}], positions[-1])) AS reach
        FROM chosen_selections JOIN chosen_steps USING (request, step)
        WHERE positions IS NOT NULL AND selected > 0 GROUP BY request, layer, head
    """)  # noqa: S608 - a number
    return _lost(scope, f"p >= {SINKS} AND position - p > greatest(coalesce(reach, 0), {recent:d})")


def top_1_dropped(scope: Scope) -> list[Measured]:
    """Share of query heads whose most probable position was not read, of steps where one stands out.

    Of all such steps, or of a head's first ones if that is larger.
    """
    return _measured(
        scope,
        f"""
        SELECT request, layer, head, {worse_of_beginning("1 - top_1_read")} AS value, count(*) AS n
        FROM (
            SELECT request, layer, head, top_1_read,
                row_number() OVER (PARTITION BY request, layer, head ORDER BY step) AS place
            FROM chosen_supports JOIN chosen_steps USING (request, step)
            WHERE NOT slow AND top_1_read IS NOT NULL AND list_max(mass) >= {PEAK}
        )
        GROUP BY request, layer, head
        """,  # noqa: S608 - our own words and a number
    )


def budget_idle(scope: Scope) -> list[Measured]:
    """Share of the selected positions that no fast step until the next refresh gave a uniform share."""
    return _measured(
        scope,
        f"""
        WITH placed AS (
            SELECT request, step, slow, audited, context_tokens,
                max(step) FILTER (slow) OVER (PARTITION BY request ORDER BY step) AS refresh
            FROM chosen_steps
        ), usable AS (
            SELECT request, refresh, step, context_tokens FROM placed WHERE NOT slow AND audited
            QUALIFY row_number() OVER (PARTITION BY request, refresh ORDER BY step) <= {STEPS}
        ), intervals AS (
            SELECT request, refresh FROM usable GROUP BY request, refresh HAVING count(*) >= {FEWEST}
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY refresh) <= {INTERVALS}
        ), used AS (
            SELECT DISTINCT request, layer, head, refresh, p FROM (
                SELECT request, layer, head, refresh, context_tokens,
                    unnest(positions) AS p, unnest(mass) AS m
                FROM chosen_supports JOIN usable USING (request, step)
                    SEMI JOIN intervals USING (request, refresh)
            ) WHERE m * context_tokens >= 1
        ), chosen AS (
            SELECT picked.request, layer, head, refresh, unnest(positions) AS p
            FROM chosen_selections picked JOIN intervals
                ON picked.request = intervals.request AND picked.step = intervals.refresh
            WHERE coalesce(reason, '') = '' AND positions IS NOT NULL
        )
        SELECT request, layer, head, avg((used.request IS NULL)::INT) AS value, count(DISTINCT refresh) AS n
        FROM (SELECT * FROM chosen SEMI JOIN (SELECT DISTINCT request, layer, head FROM chosen_supports)
                USING (request, layer, head))
            LEFT JOIN used USING (request, layer, head, refresh, p)
        GROUP BY request, layer, head
        """,  # noqa: S608 - our own numbers
    )


def _lost(scope: Scope, where: str) -> list[Measured]:
    sample_supports(scope)
    reach = ""
    if "reach" in where:
        reach = "LEFT JOIN reach USING (request, layer, head)"
    return _measured(
        scope,
        f"""
        SELECT request, layer, head, sum(m) FILTER (NOT r AND {where}) / count(DISTINCT step) AS value,
            count(DISTINCT step) AS n
        FROM (
            SELECT request, step, layer, head, position, unnest(positions) AS p, unnest(mass) AS m,
                unnest(read) AS r
            FROM sampled_supports
        ) {reach}
        GROUP BY request, layer, head
        """,  # noqa: S608 - our own words and numbers
    )


def _measured(scope: Scope, query: str) -> list[Measured]:
    return [Measured.of(row) for row in scope.rows(query)]
