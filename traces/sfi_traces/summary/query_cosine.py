"""How far queries turn from one step to the next, as FreeKV observed (Fig. 3a and 3c)."""

from typing import Any

from sfi_traces.summary.scope import Scope

THRESHOLDS = (0.8, 0.9)  # tau in FreeKV's experiments: long inputs, and long outputs
LOWEST = 4  # heads whose course over the steps is returned

Row = dict[str, Any]
BELOW = ", ".join(f"avg((query_cosine < {tau})::INT)" for tau in THRESHOLDS)


def query_cosine(scope: Scope, head: int | None = None) -> Row | None:
    """Average the cosine of each step's query with the one before, by layer and KV head (FreeKV, C_i).

    `below` has the share of values under each of `thresholds`, where FreeKV would correct with that tau.
    `heads` has the lowest mean first, `lowest` the course over the steps of the first four. With `head`, only
    this KV head. None where no audited step has a query before it.

    Paper gap: FreeKV's Figure 3 shows attention heads; a trace has C_i pooled over the query heads of a KV
    head, which is what FreeKV compares with tau.
    """
    _choose(scope, head)
    rows = scope.rows(f"""
        SELECT layer, head, count(*) AS n, avg(query_cosine) AS mean, min(query_cosine) AS min,
            [{BELOW}] AS below
        FROM cosines
        GROUP BY GROUPING SETS ((), (layer), (layer, head))
        ORDER BY mean, layer, head
    """)  # noqa: S608 - our own numbers
    overall = next(row for row in rows if row["layer"] is None)
    if not overall["n"]:
        return None
    layers = [row for row in rows if row["layer"] is not None and row["head"] is None]
    heads = [row for row in rows if row["head"] is not None]
    return {
        "thresholds": [*THRESHOLDS],
        **{name: overall[name] for name in ("n", "mean", "min", "below")},
        "layers": [
            {name: value for name, value in row.items() if name != "head"}
            for row in sorted(layers, key=lambda row: row["layer"])
        ],
        "heads": heads,
        "lowest": [_course(scope, row["layer"], row["head"]) for row in heads[:LOWEST]],
    }


def _choose(scope: Scope, head: int | None) -> None:
    wanted = "true" if head is None else f"head = {head:d}"
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW cosines AS
        SELECT step, layer, head, query_cosine::DOUBLE AS query_cosine
        FROM chosen_supports SEMI JOIN chosen_steps USING (request, step)
        WHERE isfinite(query_cosine) AND {wanted}
    """)  # noqa: S608 - a number


def _course(scope: Scope, layer: int, head: int) -> Row:
    query = """
        SELECT step, avg(query_cosine) AS mean FROM cosines WHERE layer = ? AND head = ?
        GROUP BY step ORDER BY step
    """
    rows = scope.rows(query, [layer, head])
    return {
        "layer": layer,
        "head": head,
        "steps": [row["step"] for row in rows],
        "query_cosine": [row["mean"] for row in rows],
    }
