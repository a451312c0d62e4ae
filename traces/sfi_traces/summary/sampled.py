"""Evenly chosen steps, so that the lists of positions of a trace of any length are read in moderate time."""

from sfi_traces.summary.scope import Scope

MOST_POSITIONS = 1 << 22  # read at once


def sample_selections(scope: Scope) -> int:
    """Make the view `sampled_selections` of those with positions, of every n-th refresh of a request.

    Returns:
        n; 1 where all are read.
    """
    size = scope.row("""
        SELECT coalesce(sum(selected), 0) AS positions FROM chosen_selections WHERE positions IS NOT NULL
    """)
    every = 1 + int(size["positions"]) // MOST_POSITIONS
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW sampled_selections AS
        SELECT * FROM chosen_selections SEMI JOIN (
            SELECT request, step FROM (SELECT DISTINCT request, step FROM chosen_selections)
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
        ) USING (request, step)
        WHERE positions IS NOT NULL
    """)  # noqa: S608 - a number
    return every


def sample_supports(scope: Scope) -> int:
    """Make the view `sampled_supports`, with the query's `position`, of every n-th audited fast step.

    Supports without `read`, of an older trace, are not in it.

    Returns:
        n; 1 where all are read.
    """
    size = scope.row("SELECT count(*) AS rows FROM chosen_supports WHERE read IS NOT NULL")
    top = int((scope.trace.manifest.get("audit") or {}).get("top", 1))
    every = 1 + int(size["rows"]) * top // MOST_POSITIONS
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW sampled_supports AS
        SELECT * FROM chosen_supports JOIN (
            SELECT request, step, position FROM chosen_steps WHERE audited AND NOT slow
            QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
        ) USING (request, step)
        WHERE read IS NOT NULL
    """)  # noqa: S608 - a number
    return every
