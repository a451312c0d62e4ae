"""What a lossless run drafted, how much its verifications kept, and what it read."""

from sfi_traces.model.request import Request
from sfi_traces.model.sql import bins
from sfi_traces.model.trace import Row

# counts a drafted stop token, which becomes the verification's own, as accepted; the join drops verifications
# whose steps a killed run had not yet written
VERIFIED = """(
    SELECT verified.* REPLACE (
        verified.accepted + coalesce(draft_token_id = token_id, false)::INT AS accepted
    )
    FROM chosen_verifications verified JOIN chosen_steps USING (request, step)
)"""


def lossless_facts(request: Request) -> Row | None:
    """Count verifications and kept tokens: in all, by reason, by place in the sentence, by draft depth.

    A verification tests drafted tokens up to the first that it rejects. `acceptance` is over all drafted
    tokens; `token_acceptance`, `places` and `depths` are over tested ones. A drafted stop token counts as
    kept, if the trace has token ids. Place 0 is the first token after a trigger or the prompt, depth 1 the
    first of a draft; both have bins 1, 2, 3-4, 5-8, ... `passes_per_token` counts a forward pass for each
    drafted token and each verification. None for a plain run, or without a verification.
    """
    if not request.trace.lossless:
        return None
    counts, *reasons = request.query(f"""
        SELECT reason, count(*) AS verifications, sum(drafted)::BIGINT AS drafted,
            sum(accepted)::BIGINT AS accepted, sum(accepted) / nullif(sum(drafted), 0) AS acceptance
        FROM {VERIFIED}
        GROUP BY GROUPING SETS ((), (reason)) ORDER BY grouping(reason) DESC, verifications DESC, reason
    """)  # noqa: S608 - our own words
    del counts["reason"]
    if not counts["verifications"]:
        return None
    _place_tested(request)
    tested = request.single("SELECT count(*) AS n, avg(kept::INT) AS share FROM tested")
    tokens = request.single("SELECT count(*) AS n FROM chosen_steps WHERE step > 0")["n"]
    passes = counts["drafted"] + counts["verifications"]
    return {
        "tokens": tokens,
        **counts,
        "tested": tested["n"],
        "token_acceptance": tested["share"],
        "tokens_per_verification": tokens / counts["verifications"],
        "passes_per_token": passes / tokens,
        **lossless_reads(request),
        "reasons": reasons,
        "places": _by(request, "place"),
        "depths": _by(request, "depth"),
    }


def lossless_reads(request: Request) -> Row:
    """Measure what drafts and verifications read, for rejected tokens too; None without a verification.

    The ratios are over the summed contexts of the generated tokens, which full attention would have read.
    """
    return request.single(f"""
        WITH given AS (
            SELECT count(*) AS tokens, sum(context_tokens) AS context FROM chosen_steps WHERE step > 0
        )
        SELECT sum(attended_tokens) / any_value(tokens) AS mean_attended_tokens,
            sum(selection_tokens) / any_value(tokens) AS mean_selection_tokens,
            sum(attended_tokens) / any_value(context) AS read_ratio,
            sum(selection_tokens) / any_value(context) AS selection_ratio,
            sum(attended_tokens + coalesce(selection_tokens, 0)) / any_value(context) AS cache_read_ratio
        FROM {VERIFIED}, given
    """)  # noqa: S608 - our own words


def _place_tested(request: Request) -> None:
    # a kept token has its own step; the first rejected one has the step of the token that replaced it, which
    # is the same token if it ended the request
    request.connection.execute("""
        CREATE OR REPLACE TEMP VIEW tested AS
        WITH placed AS (
            SELECT *, step - min(step) OVER (PARTITION BY request, sentence) AS place FROM chosen_steps
        )
        SELECT place, steps_since_slow AS depth, true AS kept FROM placed WHERE drafted
        UNION ALL
        SELECT place, accepted + 1, coalesce(draft_token_id = token_id, false)
        FROM placed JOIN chosen_verifications verified USING (request, step)
        WHERE accepted < verified.drafted
    """)


def _by(request: Request, column: str) -> list[Row]:
    return request.query(f"""
        SELECT {bins(column, column)},
            count(*) AS tested, count(*) FILTER (kept) AS accepted, avg(kept::INT) AS acceptance
        FROM tested
        GROUP BY ALL
        ORDER BY from_{column}
    """)  # noqa: S608 - our own words
