"""How stable supports are, what fast steps retained of them, and what the Selector decided."""

from typing import Any

from sfi_traces.health.measured import at_clip
from sfi_traces.model.request import Request
from sfi_traces.model.trace import distribution


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
