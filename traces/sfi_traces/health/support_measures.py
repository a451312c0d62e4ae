"""What health rules measure of the table `supports`: what fast steps did not read."""

import pyarrow as pa

from sfi_traces.health.measured import (
    RECORD_POSITIONS,
    Measured,
    Unjudged,
    by_head,
    measured,
    sample_selections,
    sample_supports,
    worse_of_beginning,
)
from sfi_traces.health.measures import SINKS
from sfi_traces.model.request import Request
from sfi_traces.schema import KEY

RAISE_TOP = "raise audit.top: too few recorded supports reach below a uniform share (1 / context)"
PEAK = 0.05  # the largest probability of a support that stands out
INTERVALS = 8  # first intervals between refreshes that are measured
STEPS, FEWEST = 16, 4  # most and least audited fast steps of an interval


def sink_unread(request: Request) -> list[Measured]:
    """Dense mass of the first positions that the step did not read; the mean over sampled steps."""
    return _lost(request, f"p < {SINKS}")


def look_back(request: Request) -> list[Measured]:
    """Unread dense mass further back than any selected or recent token; the mean over sampled steps.

    A selection's four earliest positions do not count: another engine's include the sinks. A policy that
    selects nothing reaches as far as its recent tokens.
    """
    sample_selections(request)
    unknown = "SELECT count(*) AS n FROM sampled_refreshes WHERE selected > 0 AND positions IS NULL"
    if request.single(unknown)["n"]:
        raise Unjudged(RECORD_POSITIONS)
    recent = request.trace.manifest["config"]["recent"]
    request.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW reach AS
        SELECT request, layer, head, max(position - coalesce(positions[{SINKS + 1}], positions[-1])) AS reach
        FROM sampled_selections JOIN chosen_steps USING (request, step)
        WHERE selected > 0 GROUP BY request, layer, head
    """)  # noqa: S608 - a number
    return _lost(request, f"p >= {SINKS} AND position - p > greatest(coalesce(reach, 0), {recent:d})")


def top_1_dropped(request: Request) -> list[Measured]:
    """Share of query heads whose most probable position was not read, in steps where one stands out."""
    source = f"""(
        SELECT request, layer, head, top_1_read,
            row_number() OVER (PARTITION BY request, layer, head ORDER BY step) AS place
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        WHERE NOT slow AND top_1_read IS NOT NULL AND list_max(mass) >= {PEAK}
    )"""  # noqa: S608 - a number
    return by_head(request, worse_of_beginning("1 - top_1_read"), source)


def budget_idle(request: Request) -> list[Measured]:
    """Share of the selected positions that got a uniform share at no fast step until the next refresh.

    Supports whose least mass is above a uniform share do not count: they may lack positions that have one.
    """
    if not _idle_intervals(request):
        return []
    found = measured(
        request,
        f"""
        WITH whole AS (
            SELECT request, layer, head, refresh, context_tokens, positions, mass
            FROM idle_supports JOIN idle_steps USING (request, step)
            WHERE list_min(mass) * context_tokens < 1 OR len(positions) >= context_tokens
        ), intervals AS (
            SELECT request, layer, head, refresh FROM whole GROUP BY ALL HAVING count(*) >= {FEWEST}
        ), used AS (
            SELECT DISTINCT request, layer, head, refresh, p FROM (
                SELECT * EXCLUDE (positions, mass), unnest(positions) AS p, unnest(mass) AS m FROM whole
            ) WHERE m * context_tokens >= 1
        ), chosen AS (
            SELECT request, layer, head, step AS refresh, unnest(positions) AS p FROM idle_selections
            WHERE coalesce(reason, '') = '' AND positions IS NOT NULL
        )
        SELECT request, layer, head, avg((used.request IS NULL)::INT) AS value, count(DISTINCT refresh) AS n
        FROM (SELECT * FROM chosen SEMI JOIN intervals USING (request, layer, head, refresh))
            LEFT JOIN used USING (request, layer, head, refresh, p)
        GROUP BY request, layer, head
        """,  # noqa: S608 - our own words and a number
    )
    known = "SELECT count(*) AS n FROM idle_selections WHERE positions IS NOT NULL"
    if not found and request.single(known)["n"]:
        raise Unjudged(RAISE_TOP)
    return found


def _idle_intervals(request: Request) -> bool:
    # makes views of the first intervals' audited fast steps and their rows; False if there are none
    steps = request.query(f"""
        WITH placed AS (
            SELECT request, step, slow, audited, context_tokens,
                max(step) FILTER (slow) OVER (PARTITION BY request ORDER BY step) AS refresh
            FROM chosen_steps
        ), usable AS (
            SELECT request, refresh, step, context_tokens FROM placed
            WHERE NOT slow AND audited AND refresh IS NOT NULL
            QUALIFY row_number() OVER (PARTITION BY request, refresh ORDER BY step) <= {STEPS}
        ), intervals AS (
            SELECT request, refresh FROM usable GROUP BY request, refresh HAVING count(*) >= {FEWEST}
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY refresh) <= {INTERVALS}
        )
        SELECT request, refresh, step, context_tokens FROM usable SEMI JOIN intervals USING (request, refresh)
    """)  # noqa: S608 - our own numbers
    if not steps:
        return False
    request.connection.register("idle_steps", pa.Table.from_pylist(steps))
    for table, at in (("supports", "step"), ("selections", "refresh")):
        keys = {"request": [row["request"] for row in steps], "step": [row[at] for row in steps]}
        request.pick(f"idle_{table}", table, pa.table(keys, pa.schema(KEY)))
    return True


def _lost(request: Request, where: str) -> list[Measured]:
    sample_supports(request)
    reach = "LEFT JOIN reach USING (request, layer, head)" if "reach" in where else ""
    source = f"""(
        SELECT request, step, layer, head, position, unnest(positions) AS p, unnest(mass) AS m,
            unnest(read) AS r
        FROM sampled_supports
    ) {reach}"""  # noqa: S608 - our own words
    value = f"sum(m) FILTER (NOT r AND {where}) / count(DISTINCT step)"
    return by_head(request, value, source, "count(DISTINCT step)")
