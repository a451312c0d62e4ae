"""What FreeKV observed: how far queries turn (Fig. 3a and 3c), single heads that select anew, and recalls."""

from typing import Any

from sfi_traces.summary.scope import Scope
from sfi_traces.summary.supports import FROM_LAG, TO_LAG

THRESHOLDS = (0.8, 0.9)  # tau in FreeKV's experiments: long inputs, and long outputs
LOWEST = 4  # heads whose course over the steps is returned

BELOW = ", ".join(f"avg((query_cosine < {tau})::INT)" for tau in THRESHOLDS)
Row = dict[str, Any]


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
    course = """
        SELECT step, avg(query_cosine) AS mean FROM cosines WHERE layer = ? AND head = ?
        GROUP BY step ORDER BY step
    """
    rows = scope.rows(course, [layer, head])
    steps, cosines = ([row[name] for row in rows] for name in ("step", "mean"))
    return {"layer": layer, "head": head, "steps": steps, "query_cosine": cosines}


def corrections(scope: Scope, head: int | None = None) -> Row | None:
    """Count FreeKV's corrections of fast steps x layers x KV heads: by layer, by head, by steps since slow.

    `since_slow` has steps 1, 2, 3-4, 5-8, ... after the last slow step. Layers that never select do not
    count. With `head`, only this KV head. None without a correction or speculative selection.
    """
    _place(scope, head)
    kinds = scope.row("""
        SELECT count(*) FILTER (reason = 'speculative') AS speculative,
            count(*) FILTER (reason = 'correction') AS correction,
            avg(query_cosine) FILTER (reason = 'correction') AS query_cosine
        FROM of_heads
    """)
    if not kinds["speculative"] + kinds["correction"]:
        return None
    rows = scope.rows("""
        SELECT layer, head, from_step, to_step, grouping(layer, head, from_step) AS kind,
            count(*) AS n, coalesce(sum(corrected::INT)::INT, 0) AS corrected, avg(corrected::INT) AS share
        FROM could_correct
        GROUP BY GROUPING SETS ((), (layer), (layer, head), (from_step, to_step))
        ORDER BY layer, head, from_step
    """)
    (overall,) = _of(rows, 0b111, ())
    return {
        **overall,
        **{name: kinds[name] for name in ("speculative", "query_cosine")},
        "layers": _of(rows, 0b011, ("layer",)),
        "heads": _of(rows, 0b001, ("layer", "head")),
        "since_slow": _of(rows, 0b110, ("from_step", "to_step")),
    }


def recalls(scope: Scope) -> Row | None:
    """Sum up what decoding steps fetched from the host, and how long they waited, by layer too.

    Rows and bytes of K and V and microseconds, in all and per step of a request; None without a recall.
    """
    steps = scope.row("SELECT count(*) AS steps FROM chosen_steps WHERE step > 0")["steps"]
    rows = scope.rows(
        """
        SELECT layer, sum(rows)::BIGINT AS rows, sum(bytes)::BIGINT AS bytes, sum(waited_us) AS waited_us,
            sum(bytes) / ? AS step_bytes, sum(waited_us) / ? AS step_waited_us
        FROM chosen_recalls SEMI JOIN chosen_steps USING (request, step)
        WHERE step > 0
        GROUP BY GROUPING SETS ((), (layer))
        ORDER BY layer NULLS FIRST
        """,
        [steps, steps],
    )
    if len(rows) == 1:
        return None
    overall = {name: value for name, value in rows[0].items() if name != "layer"}
    return {"steps": steps, **overall, "layers": rows[1:]}


def _place(scope: Scope, head: int | None) -> None:
    wanted = "true" if head is None else f"head = {head:d}"
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW of_heads AS
        SELECT * FROM chosen_selections SEMI JOIN chosen_steps USING (request, step) WHERE {wanted}
    """)  # noqa: S608 - a number
    scope.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW could_correct AS
        WITH places AS (SELECT DISTINCT request, layer, head FROM of_heads), moved AS (
            SELECT DISTINCT request, step, layer, head, true AS corrected
            FROM of_heads WHERE reason = 'correction'
        )
        SELECT layer, head, coalesce(corrected, false) AS corrected,
            ({FROM_LAG})::INT AS from_step, ({TO_LAG})::INT AS to_step
        FROM (SELECT *, steps_since_slow AS lag FROM chosen_steps WHERE NOT slow)
        JOIN places USING (request) LEFT JOIN moved USING (request, step, layer, head)
    """)  # noqa: S608 - our own words


def _of(rows: list[Row], kind: int, keys: tuple[str, ...]) -> list[Row]:
    # `kind` is SQL's grouping(): a bit is set for each column that the group leaves out
    names = (*keys, "n", "corrected", "share")
    return [{name: row[name] for name in names} for row in rows if row["kind"] == kind]
