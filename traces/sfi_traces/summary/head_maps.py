"""What was observed of each layer and KV head: how far queries turn, which heads select anew; and recalls by layer."""

from sfi_traces.model.request import Request
from sfi_traces.model.trace import Row, bins

THRESHOLDS = (0.8, 0.9)  # tau in FreeKV's experiments: long inputs, and long outputs
LOWEST = 4  # heads whose course over the steps is returned


def by_head(request: Request, values: str, source: str) -> Row:
    """Sum up an observation of KV heads: `values`, columns in SQL, of all rows of `source`, and by layer and head.

    Returns the values over all, and those of each of `layers` and of `heads`, ascending.
    """

    def grouped(keys: str) -> list[Row]:
        return request.query(f"SELECT {keys}{values} FROM {source} GROUP BY ALL ORDER BY ALL")  # noqa: S608 - our own words

    return {**grouped("")[0], "layers": grouped("layer, "), "heads": grouped("layer, head, ")}


def query_cosine(request: Request) -> Row | None:
    """Average the cosine of each step's query with the one before, by layer and KV head (FreeKV, C_i).

    `below` has the share of values under each of `thresholds`, where FreeKV would correct with that tau.
    `heads` has the lowest mean first, `lowest` the course over the steps of the first four. None where no audited
    step has a query before it.

    Paper gap: FreeKV's Figure 3 shows attention heads; a trace has C_i pooled over the query heads of a KV
    head, which is what FreeKV compares with tau.
    """
    request.connection.execute("""
        CREATE OR REPLACE TEMP VIEW cosines AS
        SELECT step, layer, head, query_cosine::DOUBLE AS query_cosine
        FROM chosen_supports SEMI JOIN chosen_steps USING (request, step)
        WHERE isfinite(query_cosine)
    """)
    below = ", ".join(f"avg((query_cosine < {tau})::INT)" for tau in THRESHOLDS)
    values = f"count(*) AS n, avg(query_cosine) AS mean, min(query_cosine) AS min, [{below}] AS below"
    found = by_head(request, values, "cosines")
    if not found["n"]:
        return None
    found["heads"].sort(key=lambda row: (row["mean"], row["layer"], row["head"]))
    lowest = [_course(request, row["layer"], row["head"]) for row in found["heads"][:LOWEST]]
    return {"thresholds": [*THRESHOLDS], **found, "lowest": lowest}


def _course(request: Request, layer: int, head: int) -> Row:
    course = """
        SELECT step, avg(query_cosine) AS mean FROM cosines WHERE layer = ? AND head = ?
        GROUP BY step ORDER BY step
    """
    rows = request.query(course, [layer, head])
    steps, cosines = ([row[name] for row in rows] for name in ("step", "mean"))
    return {"layer": layer, "head": head, "steps": steps, "query_cosine": cosines}


def corrections(request: Request) -> Row | None:
    """Count FreeKV's corrections of fast steps x layers x KV heads: by layer, by head, by steps since slow.

    `since_slow` has steps 1, 2, 3-4, 5-8, ... after the last slow step. Layers that never select do not
    count. None without a correction or speculative selection.
    """
    _place_corrections(request)
    kinds = request.single("""
        SELECT count(*) FILTER (reason = 'speculative') AS speculative,
            count(*) FILTER (reason = 'correction') AS correction,
            avg(query_cosine) FILTER (reason = 'correction') AS query_cosine
        FROM of_heads
    """)
    if not kinds["speculative"] + kinds["correction"]:
        return None
    values = "count(*) AS n, coalesce(sum(corrected::INT)::INT, 0) AS corrected, avg(corrected::INT) AS share"
    found = by_head(request, values, "could_correct")
    since_slow = request.query(f"""
        SELECT {bins("steps_since_slow", "step")}, {values} FROM could_correct GROUP BY ALL ORDER BY from_step
    """)  # noqa: S608 - our own words
    numbers = {name: kinds[name] for name in ("speculative", "query_cosine")}
    return {name: found[name] for name in ("n", "corrected", "share")} | numbers | found | {"since_slow": since_slow}


def _place_corrections(request: Request) -> None:
    request.connection.execute("""
        CREATE OR REPLACE TEMP VIEW of_heads AS
        SELECT * FROM chosen_selections SEMI JOIN chosen_steps USING (request, step)
    """)
    request.connection.execute("""
        CREATE OR REPLACE TEMP VIEW could_correct AS
        WITH places AS (SELECT DISTINCT request, layer, head FROM of_heads), moved AS (
            SELECT DISTINCT request, step, layer, head, true AS corrected
            FROM of_heads WHERE reason = 'correction'
        )
        SELECT layer, head, coalesce(corrected, false) AS corrected, steps_since_slow
        FROM (SELECT * FROM chosen_steps WHERE NOT slow)
        JOIN places USING (request) LEFT JOIN moved USING (request, step, layer, head)
    """)


def recalls(request: Request) -> Row | None:
    """Sum up what decoding steps fetched from the host, and how long they waited, by layer too.

    Rows and bytes of K and V and microseconds, in all and per step of a request; None without a recall.
    """
    steps = request.single("SELECT count(*) AS steps FROM chosen_steps WHERE step > 0")["steps"]
    overall, *layers = request.query(
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
    del overall["layer"]
    return {"steps": steps, **overall, "layers": layers} if layers else None
