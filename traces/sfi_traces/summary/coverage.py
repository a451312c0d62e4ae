"""Where selected positions lie: how much of the prompt they cover, how far back, how long they stay."""

from typing import Any

from sfi_traces.health.measured import sample_selections
from sfi_traces.model.request import Request
from sfi_traces.model.sql import distribution


def coverage_facts(request: Request) -> dict[str, Any] | None:
    """Measure where selected positions lie; None without positions of selections.

    `selected`: share of a prompt's positions that a KV head ever selected, the mean over heads, and by layer;
    `selected_by_any`: that any head selected. `distance`: tokens from a selected position to the query.
    `stay`: refreshes that a position stays, on average. `every`: positions are taken from every n-th refresh.
    """
    every = sample_selections(request)
    prompts = ", ".join(f"({one['request']:d}, {one['tokens']:d})" for one in request.trace.manifest.get("prompts", []))
    rows = request.query(f"""
        WITH prompts (request, tokens) AS (VALUES {prompts or "(-1, 1)"}), heads AS (
            SELECT request, layer, head, tokens, count(DISTINCT p) / tokens AS share
            FROM (SELECT request, layer, head, unnest(positions) AS p FROM sampled_selections)
                JOIN prompts USING (request)
            WHERE p < tokens GROUP BY request, layer, head, tokens
        )
        SELECT layer, avg(share) AS selected FROM heads GROUP BY GROUPING SETS ((), (layer))
        ORDER BY layer NULLS FIRST
    """)  # noqa: S608 - our own numbers
    if not rows[1:]:  # the first one is of all layers
        return None
    any_head = request.single(f"""
        WITH prompts (request, tokens) AS (VALUES {prompts})
        SELECT avg(share) AS share FROM (
            SELECT count(DISTINCT p) / tokens AS share
            FROM (SELECT request, unnest(positions) AS p FROM sampled_selections) JOIN prompts USING (request)
            WHERE p < tokens GROUP BY request, tokens
        )
    """)  # noqa: S608 - our own numbers
    distance = request.single(f"""
        SELECT {distribution("position - p")} AS distance FROM (
            SELECT position, unnest(positions) AS p
            FROM sampled_selections JOIN chosen_steps USING (request, step)
        )
    """)  # noqa: S608 - our own words
    stay = request.single("SELECT sum(selected) / nullif(sum(added), 0) AS stay FROM chosen_selections")
    return {
        "selected": rows[0]["selected"],
        "selected_by_any": any_head["share"],
        "layers": rows[1:],
        **distance,
        **stay,
        "every": every,
    }
