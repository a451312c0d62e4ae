"""What was observed of layers and KV heads: supports, what fast steps retained, selections, queries, recalls."""

from typing import Any

from sfi_traces.health.measures import at_clip
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Row, bins, distribution

THRESHOLDS = (0.8, 0.9)  # tau in FreeKV's experiments: long inputs, and long outputs
LOWEST = 4  # heads whose course over the steps is returned
COSINES = """(
    SELECT step, layer, head, query_cosine::DOUBLE AS query_cosine
    FROM chosen_supports SEMI JOIN chosen_steps USING (request, step)
    WHERE isfinite(query_cosine)
)"""
OF_HEADS = "chosen_selections SEMI JOIN chosen_steps USING (request, step)"
# fast steps x layers x KV heads that ever select
COULD_CORRECT = f"""(
    WITH places AS (SELECT DISTINCT request, layer, head FROM {OF_HEADS}), moved AS (
        SELECT DISTINCT request, step, layer, head, true AS corrected FROM {OF_HEADS} WHERE reason = 'correction'
    )
    SELECT layer, head, coalesce(corrected, false) AS corrected, steps_since_slow
    FROM (SELECT * FROM chosen_steps WHERE NOT slow)
    JOIN places USING (request) LEFT JOIN moved USING (request, step, layer, head)
)"""  # noqa: S608 - our own words


def stability(request: Request) -> dict[str, Any] | None:
    """Measure the overlap coefficient of consecutive supports, within sentences and across boundaries.

    A pair of steps is across a boundary if it generates tokens of different sentences; the later query is then the
    boundary token. `chance` is the overlap of two random supports. None without two such steps.
    """
    rows = request.query(f"""
        WITH marked AS (
            SELECT *, sentence <> lag(sentence) OVER (PARTITION BY request ORDER BY step) AS across FROM chosen_steps
        )
        SELECT layer, across, {distribution("overlap_previous_step")} AS overlap
        FROM chosen_supports JOIN marked USING (request, step)
        WHERE overlap_previous_step IS NOT NULL AND across IS NOT NULL
        GROUP BY GROUPING SETS ((across), (layer, across)) ORDER BY layer
    """)  # noqa: S608 - our own words
    if not rows:
        return None
    places = {row["layer"]: {"within": None, "across": None} for row in rows}
    for row in rows:
        places[row["layer"]]["across" if row["across"] else "within"] = row["overlap"]
    overall = places.pop(None)
    query = """
        SELECT avg(least(1, ? / context_tokens)) AS chance
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        WHERE overlap_previous_step IS NOT NULL
    """
    overall |= request.single(query, [request.trace.manifest["audit"]["top"]])
    return {**overall, "layers": [{"layer": layer, **overlaps} for layer, overlaps in places.items()]}


def audit_facts(request: Request) -> dict[str, Any] | None:
    """Measure the audited steps: retained mass and output error of fast ones, query cosine of all.

    `heads` has every KV head, the lowest retained mass first. `retained_mass_min` is of each KV head's query head that
    retains least; `top_1_read` the share of query heads whose most probable position was attended. None if unaudited.
    """
    fast = ("retained_mass", "retained_mass_min", "top_1_read", "output_error")
    columns = "".join(f"{distribution(f'CASE WHEN NOT slow THEN {name} END')} AS {name}, " for name in fast)
    rows = request.query(f"""
        SELECT layer, {columns} {distribution("query_cosine")} AS query_cosine
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        GROUP BY GROUPING SETS ((), (layer)) ORDER BY layer NULLS FIRST
    """)  # noqa: S608 - our own words
    if len(rows) == 1:
        return None
    heads = request.query(f"""
        SELECT layer, head, {distribution("retained_mass")} AS retained_mass
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        WHERE NOT slow GROUP BY layer, head ORDER BY avg(retained_mass), layer, head
    """)  # noqa: S608 - our own words
    overall = {key: value for key, value in rows[0].items() if key != "layer"}
    if not any(values["n"] for values in overall.values()):
        return None  # an import may have none of these
    return {**overall, "layers": rows[1:], "heads": heads}


def logits_facts(request: Request) -> dict[str, Any] | None:
    """Compare the next-token distributions of audited fast steps with dense attention's."""
    facts = request.single(f"""
        SELECT {distribution("kl_next_token")} AS kl_next_token, avg(argmax_agrees::INT) AS argmax_agreement
        FROM chosen_logits
    """)  # noqa: S608 - our own words
    return facts if facts["kl_next_token"]["n"] else None


def disagreements(request: Request) -> list[dict[str, Any]]:
    """List the steps where dense attention has another most probable token, the largest KL first.

    None of a lossless run, which gives dense attention's tokens.
    """
    if request.trace.lossless:
        return []
    return request.query("""
        SELECT request, step, token_text, dense_token_text, dense_probability, kl_next_token
        FROM chosen_logits JOIN chosen_steps USING (request, step)
        WHERE NOT argmax_agrees ORDER BY kl_next_token DESC, request, step
    """)


def selection_facts(request: Request) -> dict[str, Any] | None:
    """Measure how far selections differ from those before; lambda*, with the share at its clip; codescan's scores."""
    facts = request.single(f"""
        SELECT count(*) AS rows,
            {distribution("overlap_previous")} AS overlap_previous,
            {distribution("jaccard_previous")} AS jaccard_previous,
            {distribution("lambda_star")} AS lambda_star,
            {distribution("unread_estimate")} AS unread_estimate,
            {distribution("score_margin")} AS score_margin,
            avg({at_clip(request)}::INT) AS clipped_share
        FROM chosen_selections
    """)  # noqa: S608 - our own words
    return facts if facts["rows"] else None


def by_head(request: Request, values: str, source: str) -> Row:
    """Sum up an observation of KV heads: `values`, columns in SQL, of all rows of `source`, and by layer and head.

    Returns the values over all, and those of each of `layers` and of `heads`, ascending.
    """

    def grouped(keys: str) -> list[Row]:
        return request.query(f"SELECT {keys}{values} FROM {source} GROUP BY ALL ORDER BY ALL")  # noqa: S608 - our own words

    return {**grouped("")[0], "layers": grouped("layer, "), "heads": grouped("layer, head, ")}


def query_cosine(request: Request) -> Row | None:
    """Average the cosine of each step's query with the one before, by layer and KV head (FreeKV, C_i).

    `below` has the share under each of `thresholds`, where FreeKV would correct with that tau; `heads` the lowest mean
    first; `lowest` the course over the steps of the first four. None where no audited step has a query before it.

    Paper gap: FreeKV's Figure 3 shows attention heads; a trace has C_i pooled over the query heads of a KV
    head, which is what FreeKV compares with tau.
    """
    below = ", ".join(f"avg((query_cosine < {tau})::INT)" for tau in THRESHOLDS)
    values = f"count(*) AS n, avg(query_cosine) AS mean, min(query_cosine) AS min, [{below}] AS below"
    cosines = by_head(request, values, COSINES)
    if not cosines["n"]:
        return None
    cosines["heads"].sort(key=lambda row: (row["mean"], row["layer"], row["head"]))
    course = f"""
        SELECT layer, head, list(step ORDER BY step) AS steps, list(mean ORDER BY step) AS query_cosine
        FROM (SELECT layer, head, step, avg(query_cosine) AS mean FROM {COSINES} GROUP BY ALL)
        WHERE layer = ? AND head = ? GROUP BY layer, head
    """  # noqa: S608 - our own words
    lowest = [request.single(course, [row["layer"], row["head"]]) for row in cosines["heads"][:LOWEST]]
    return {"thresholds": [*THRESHOLDS], **cosines, "lowest": lowest}


def corrections(request: Request) -> Row | None:
    """Count FreeKV's corrections of fast steps x layers x KV heads: by layer, by head, by steps since slow.

    `since_slow` has steps 1, 2, 3-4, 5-8, ... after the last slow step. Layers that never select do not
    count. None without a correction or speculative selection.
    """
    kinds = request.single(f"""
        SELECT count(*) FILTER (reason = 'speculative') AS speculative,
            count(*) FILTER (reason = 'correction') AS correction,
            avg(query_cosine) FILTER (reason = 'correction') AS query_cosine
        FROM {OF_HEADS}
    """)  # noqa: S608 - our own words
    if not kinds["speculative"] + kinds.pop("correction"):
        return None
    values = "count(*) AS n, coalesce(sum(corrected::INT)::INT, 0) AS corrected, avg(corrected::INT) AS share"
    since_slow = request.query(f"""
        SELECT {bins("steps_since_slow", "step")}, {values} FROM {COULD_CORRECT} GROUP BY ALL ORDER BY from_step
    """)  # noqa: S608 - our own words
    return {**kinds, **by_head(request, values, COULD_CORRECT), "since_slow": since_slow}


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
        WHERE step > 0 GROUP BY GROUPING SETS ((), (layer)) ORDER BY layer NULLS FIRST
        """,
        [steps, steps],
    )
    del overall["layer"]
    return {"steps": steps, **overall, "layers": layers} if layers else None
