"""How stable supports are, what fast steps retained of them, and what the Selector decided."""

from typing import Any

from sfi_traces.health.measured import at_clip
from sfi_traces.model.request import Request
from sfi_traces.model.trace import bins, distribution


def stability(request: Request) -> dict[str, Any] | None:
    """Measure the overlap coefficient of consecutive supports, within sentences and across boundaries.

    A pair of steps is across a boundary if it generates tokens of different sentences; the later query is
    then the boundary token. `chance` is the overlap of two random supports. None without two such steps.
    """
    rows = request.query(f"""
        WITH marked AS (
            SELECT request, step,
                sentence <> lag(sentence) OVER (PARTITION BY request ORDER BY step) AS across
            FROM chosen_steps
        )
        SELECT layer, across, {distribution("overlap_previous_step")} AS overlap
        FROM chosen_supports JOIN marked USING (request, step)
        WHERE overlap_previous_step IS NOT NULL AND across IS NOT NULL
        GROUP BY GROUPING SETS ((across), (layer, across))
        ORDER BY layer
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


def overlap_by_lag(request: Request) -> dict[str, Any] | None:
    """Measure the overlap of a step's support with the one at the last refresh, by steps since then.

    A trace without fast steps, such as full-kv's, has no refreshes: there those steps count that Eq. 5 would
    make slow under its triggers and `trigger_delay`, and `refreshes` is "boundaries" in place of "recorded".
    `lags` has an entry for 1, 2, 3-4, 5-8, ...: `reuse` at steps that are no refresh, `refresh` at refreshes.
    """
    recorded = bool(request.single("SELECT count(*) AS n FROM chosen_steps WHERE NOT slow")["n"])
    pairs = "recorded_pairs" if recorded else "boundary_pairs"
    (_place_recorded if recorded else _place_boundaries)(request)
    rows = request.query(f"""
        SELECT {bins("lag", "lag")}, refresh,
            {distribution("overlap")} AS overlap
        FROM {pairs} WHERE overlap IS NOT NULL AND lag IS NOT NULL
        GROUP BY ALL
        ORDER BY from_lag
    """)  # noqa: S608 - our own words
    if not rows:
        return None
    lags: dict[int, dict[str, Any]] = {}
    for row in rows:
        edges = {name: row[name] for name in ("from_lag", "to_lag")}
        entry = lags.setdefault(row["from_lag"], edges | {"reuse": None, "refresh": None})
        entry["refresh" if row["refresh"] else "reuse"] = row["overlap"]
    return {"refreshes": "recorded" if recorded else "boundaries", "lags": [*lags.values()]}


def _place_recorded(request: Request) -> None:
    request.connection.execute(f"""
        CREATE OR REPLACE TEMP VIEW recorded_pairs AS {_placed("slow")}
        SELECT refresh, step - last AS lag, overlap_last_refresh AS overlap
        FROM chosen_supports JOIN placed USING (request, step)
    """)  # noqa: S608 - our own words


def _place_boundaries(request: Request) -> None:
    back = request.trace.manifest["config"]["trigger_delay"] + 1
    refresh = f"step = 0 OR coalesce(lag(trigger, {back:d}) OVER of_request, false)"
    request.compare(
        "boundary_pairs",
        f"""
        {_placed(refresh)}
        SELECT refresh, this.step - last AS lag, this.positions AS first, that.positions AS second
        FROM chosen_supports this JOIN placed USING (request, step)
        JOIN (
            FROM chosen_supports SEMI JOIN (FROM marked WHERE refresh) USING (request, step)
        ) that ON that.step = last
            AND (that.request, that.layer, that.head) = (this.request, this.layer, this.head)
        """,  # noqa: S608 - our own words
    )


def _placed(refresh: str) -> str:
    return f"""
        WITH marked AS (
            SELECT request, step, {refresh} AS refresh FROM chosen_steps
            WINDOW of_request AS (PARTITION BY request ORDER BY step)
        ), placed AS (
            SELECT *, max(step) FILTER (refresh) OVER (
                PARTITION BY request ORDER BY step ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS last
            FROM marked
        )
    """  # noqa: S608 - our own words


def audit_facts(request: Request) -> dict[str, Any] | None:
    """Measure the audited steps: retained mass and output error of fast ones, query cosine of all.

    Slow steps retain 1 by definition and do not count. `heads` has every KV head, the lowest retained mass
    first. `retained_mass_min` is of each KV head's query head that retains least; `top_1_read` is the share
    of query heads whose most probable position was attended. None without supports.
    """
    rows = request.query(f"""
        SELECT layer,
            {distribution("CASE WHEN NOT slow THEN retained_mass END")} AS retained_mass,
            {distribution("CASE WHEN NOT slow THEN retained_mass_min END")} AS retained_mass_min,
            {distribution("CASE WHEN NOT slow THEN top_1_read END")} AS top_1_read,
            {distribution("CASE WHEN NOT slow THEN output_error END")} AS output_error,
            {distribution("query_cosine")} AS query_cosine
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        GROUP BY GROUPING SETS ((), (layer))
        ORDER BY layer NULLS FIRST
    """)  # noqa: S608 - our own words
    if len(rows) == 1:
        return None
    heads = request.query(f"""
        SELECT layer, head, {distribution("retained_mass")} AS retained_mass
        FROM chosen_supports JOIN chosen_steps USING (request, step)
        WHERE NOT slow
        GROUP BY layer, head
        ORDER BY avg(retained_mass), layer, head
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
    query = f"""
        SELECT count(*) AS rows,
            {distribution("overlap_previous")} AS overlap_previous,
            {distribution("jaccard_previous")} AS jaccard_previous,
            {distribution("lambda_star")} AS lambda_star,
            {distribution("unread_estimate")} AS unread_estimate,
            {distribution("score_margin")} AS score_margin,
            avg({at_clip(request)}::INT) AS clipped_share
        FROM chosen_selections
    """  # noqa: S608 - our own words
    facts = request.single(query)
    return facts if facts["rows"] else None
