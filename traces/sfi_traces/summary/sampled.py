"""Views of evenly chosen steps, so that positions of a long trace are read in moderate time."""

import pyarrow as pa

from sfi_traces.schema import KEY
from sfi_traces.summary.scope import Scope

SAMPLED = "sampled_selections"
MOST_POSITIONS = 1 << 22  # read at once


def sample_selections(scope: Scope) -> int:
    """Make the view `sampled_selections`, with positions, of every n-th refresh of a request; return n.

    The view `sampled_refreshes` includes selections without positions.
    """
    size = scope.row("SELECT coalesce(sum(selected), 0) AS positions FROM chosen_selections")
    every = 1 + int(size["positions"]) // MOST_POSITIONS
    if SAMPLED in scope.kept:
        return every
    picked = scope.rows(f"""
        SELECT request, step FROM (SELECT DISTINCT request, step FROM chosen_selections)
        QUALIFY row_number() OVER (PARTITION BY request ORDER BY step) % {every:d} = {1 % every:d}
    """)  # noqa: S608 - a number
    keys = {name: [row[name] for row in picked] for name in ("request", "step")}
    scope.pick("sampled_refreshes", "selections", pa.table(keys, pa.schema(KEY)))
    scope.connection.execute("""
        CREATE OR REPLACE TEMP VIEW sampled_selections AS
        SELECT * FROM sampled_refreshes WHERE positions IS NOT NULL
    """)
    scope.kept[SAMPLED] = True
    return every


def sample_supports(scope: Scope) -> None:
    """Make the view `sampled_supports`: rows with `read` of every n-th audited fast step, with `position`."""
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
