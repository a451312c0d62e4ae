"""What was run, how its steps went, what triggered, drafted and verified, and where the time went."""

from sfi_core.settings.config import changed_settings
from sfi_traces.model.request import Request
from sfi_traces.model.trace import Row, bins

FROM_MANIFEST = [
    "policy", "preset", "backend", "device", "redacted", "created", "finished", "stopped", "audit",
    "graphs", "not_replayed",
]  # fmt: skip


def run_facts(request: Request) -> Row:
    """Describe the run from its manifest, and count its recorded steps."""
    manifest = request.trace.manifest
    recorded = request.query("SELECT request, count(*) AS steps FROM chosen_steps GROUP BY 1 ORDER BY 1")
    prompts = {prompt["request"]: prompt["tokens"] for prompt in manifest["prompts"]}
    return {
        "model": manifest["model"]["name"],
        "architecture": manifest["model"]["architecture"],
        **{name: getattr(request.trace, name) for name in ("lossless", "imported", "unit")},
        **{key: manifest.get(key) for key in FROM_MANIFEST},
        "settings": changed_settings(manifest["config"]),
        "requests": [row | {"prompt_tokens": prompts.get(row["request"])} for row in recorded],
    }


def answers(request: Request) -> list[Row]:
    """Join the generated tokens of each request; the text of a redacted one is None."""
    return request.query("""
        SELECT request, string_agg(token_text, '' ORDER BY step) AS text FROM chosen_steps
        GROUP BY request ORDER BY request
    """)


def step_facts(request: Request) -> Row:
    """Count steps by reason, and what those from step 1 on read.

    `read_ratio` is attended tokens over context tokens, both summed, in a lossless run with what was read for rejected
    tokens; `selection_ratio` is what choosing read over the same, None in a trace that does not tell;
    `cache_read_ratio` is the sum. `launched` counts the steps from 1 on that report whether they were replayed as CUDA
    graphs, `replayed` those that were.
    """
    counts = request.single("""
        SELECT count(*) AS steps, count(*) FILTER (slow) AS slow, count(*) FILTER (NOT slow) AS fast,
            avg(slow::INT) AS slow_share,
            avg(attended_tokens) FILTER (step > 0) AS mean_attended_tokens,
            avg(selection_tokens) FILTER (step > 0) AS mean_selection_tokens,
            sum(attended_tokens) FILTER (step > 0) / sum(context_tokens) FILTER (step > 0) AS read_ratio,
            sum(selection_tokens) FILTER (step > 0) / sum(context_tokens) FILTER (step > 0) AS selection_ratio,
            sum(read_tokens) FILTER (step > 0) / sum(context_tokens) FILTER (step > 0) AS cache_read_ratio,
            sum(attended_tokens) FILTER (NOT slow) / sum(context_tokens) FILTER (NOT slow) AS fast_read_ratio,
            sum(read_tokens) FILTER (NOT slow) / sum(context_tokens) FILTER (NOT slow) AS fast_cache_read_ratio,
            count(graphs) FILTER (step > 0) AS launched,
            count(*) FILTER (graphs AND step > 0) AS replayed
        FROM (SELECT *, attended_tokens + coalesce(selection_tokens, 0) AS read_tokens FROM chosen_steps)
    """)
    reasons = request.query("""
        SELECT reason, count(*) AS steps FROM chosen_steps WHERE slow GROUP BY reason ORDER BY steps DESC, reason
    """)
    if request.trace.lossless:
        counts |= lossless_reads(request)
    return counts | {"reasons": {row["reason"]: row["steps"] for row in reasons}}


def trigger_tokens(request: Request) -> list[Row]:
    """Count the generated tokens of T_trig, and the share of them that a slow step followed.

    It is expected `1 + trigger_delay` steps after; tokens too near the end do not count. In a redacted trace
    all tokens are one row.
    """
    query = """
        SELECT token_id, token_text, count(*) AS count, avg(after::INT) AS slow_after
        FROM (SELECT *, lead(slow, ?) OVER (PARTITION BY request ORDER BY step) AS after FROM chosen_steps)
        WHERE trigger GROUP BY token_id, token_text ORDER BY count DESC, token_id
    """
    return request.query(query, [1 + request.trace.manifest["config"]["trigger_delay"]])


# a drafted stop token, which becomes the verification's own, is accepted; a killed run may lack a verification's step
VERIFIED = """(
    SELECT verified.* REPLACE (verified.accepted + coalesce(draft_token_id = token_id, false)::INT AS accepted)
    FROM chosen_verifications verified JOIN chosen_steps USING (request, step)
)"""
# a kept token has its own step; the first rejected one that of the token in its place, the same if it ends the request
TESTED = """(
    WITH placed AS (SELECT *, step - min(step) OVER (PARTITION BY request, sentence) AS place FROM chosen_steps)
    SELECT place, steps_since_slow AS depth, true AS kept FROM placed WHERE drafted
    UNION ALL
    SELECT place, accepted + 1, coalesce(draft_token_id = token_id, false)
    FROM placed JOIN chosen_verifications verified USING (request, step)
    WHERE accepted < verified.drafted
)"""


def lossless_facts(request: Request) -> Row | None:
    """Count verifications and kept tokens: in all, by reason, by place in the sentence, by draft depth.

    A verification tests drafted tokens up to the first that it rejects. `acceptance` is over all drafted tokens;
    `token_acceptance`, `places` and `depths` are over tested ones. A drafted stop token counts as kept, if the trace
    has token ids. Place 0 is the first token after a trigger or the prompt, depth 1 the first of a draft.
    `passes_per_token` counts a forward pass for each drafted token and each verification. None without a verification.
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
    tested = request.single(f"SELECT count(*) AS n, avg(kept::INT) AS share FROM {TESTED}")  # noqa: S608 - our own words
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
        WITH given AS (SELECT count(*) AS tokens, sum(context_tokens) AS context FROM chosen_steps WHERE step > 0)
        SELECT sum(attended_tokens) / any_value(tokens) AS mean_attended_tokens,
            sum(selection_tokens) / any_value(tokens) AS mean_selection_tokens,
            sum(attended_tokens) / any_value(context) AS read_ratio,
            sum(selection_tokens) / any_value(context) AS selection_ratio,
            sum(attended_tokens + coalesce(selection_tokens, 0)) / any_value(context) AS cache_read_ratio
        FROM {VERIFIED}, given
    """)  # noqa: S608 - our own words


def _by(request: Request, column: str) -> list[Row]:
    return request.query(f"""
        SELECT {bins(column, column)},
            count(*) AS tested, count(*) FILTER (kept) AS accepted, avg(kept::INT) AS acceptance
        FROM {TESTED} GROUP BY ALL ORDER BY from_{column}
    """)  # noqa: S608 - our own words


CONTAINERS = ("prefill", "forward")
# what the requests of one step of a batch have in common; runs of one trace may be as long to the microsecond
BATCH_STEP = "(coalesce(batch, -1), coalesce(batch_step, step), elapsed_us)"
CHOSEN = f"(SELECT {BATCH_STEP} FROM chosen_steps LEFT JOIN batches USING (request))"  # noqa: S608 - our own words
KINDS, PARTS = ("prefill", "slow", "fast", "mixed"), ("prefill", "decode")


def latency(request: Request) -> Row:
    """Measure the time of the batch's steps by kind.

    Kind "prefill" is step 0 of a request; "mixed" is slow for some requests of the batch and fast for others. A kind's
    unaudited steps are taken alone; `audited` says that there are none. `tokens_per_second` is over all steps from 1
    on; in a lossless run, whose rejected drafts have no step, from the first span of decoding to the end of the last.
    """
    rows = request.query(f"""
        WITH batch_steps AS (
            SELECT any_value(elapsed_us) AS elapsed_us, bool_or(audited) AS audited, CASE
                WHEN bool_or(step = 0) THEN 'prefill' WHEN bool_and(slow) THEN 'slow'
                WHEN bool_or(slow) THEN 'mixed' ELSE 'fast' END AS kind
            FROM steps LEFT JOIN batches USING (request)
            WHERE elapsed_us IS NOT NULL AND {BATCH_STEP} IN {CHOSEN}
            GROUP BY {BATCH_STEP}
        )
        SELECT kind, audited, count(*) AS n, avg(elapsed_us) AS mean_us, sum(elapsed_us) AS total_us,
            quantile_cont(elapsed_us, 0.5) AS p50_us, quantile_cont(elapsed_us, 0.95) AS p95_us,
            quantile_cont(elapsed_us, 0.99) AS p99_us
        FROM batch_steps GROUP BY kind, audited ORDER BY audited DESC
    """)  # noqa: S608 - our own words
    decoding = [row for row in rows if row["kind"] != "prefill"]
    taken_us = _spanned_us(request) if request.trace.lossless else sum(row["total_us"] for row in decoding)
    tokens = request.single("SELECT count(*) AS n FROM chosen_steps WHERE step > 0")["n"]
    of_kind = {row["kind"]: row for row in rows}  # the unaudited row, which comes last, wins
    return {
        "kinds": [of_kind[kind] for kind in KINDS if kind in of_kind],
        "tokens_per_second": tokens / (taken_us / 1e6) if taken_us else None,
        "audited": any(row["audited"] for row in decoding),
    }


def _spanned_us(request: Request) -> float:
    # from the first span of decoding to the end of the last, summed over runs; 0 without spans
    spanned = request.single("""
        WITH decoded AS (
            SELECT batch, min(batch_step) AS prompt, max(batch_step) AS last
            FROM timed_steps SEMI JOIN chosen_steps USING (request) GROUP BY batch
        ), spanned AS (
            SELECT max(begin_us + elapsed_us) - min(begin_us) AS us
            FROM chosen_timings timings JOIN decoded
            ON timings.request = batch AND timings.step > prompt AND timings.step <= last
            GROUP BY batch
        )
        SELECT coalesce(sum(us), 0) AS us FROM spanned
    """)
    return float(spanned["us"])


def phases(request: Request) -> Row | None:
    """Share out the time of the prefill and of decoding over the innermost spans.

    The whole is the forward passes and what is outside of them; "other" is what passes took beyond their layers' spans.
    Spans on another stream count on top. `step_us` is the mean over the steps that have such a span.
    """
    rows = request.query("""
        SELECT (request, step) IN (FROM prefills) AS prefill, stream, name, layer IS NULL AS outside,
            count(*) AS spans, sum(elapsed_us) AS total_us, count(DISTINCT (request, step)) AS steps
        FROM chosen_timings GROUP BY ALL ORDER BY total_us DESC, name
    """)
    parts = {name: _shares([row for row in rows if row["prefill"] is (name == "prefill")]) for name in PARTS}
    return parts if any(parts.values()) else None


def _shares(rows: list[Row]) -> list[Row]:
    passes = [row for row in rows if row["name"] in CONTAINERS]
    leaves = [row for row in rows if row["name"] not in CONTAINERS]
    if not passes:
        return []
    streams = {row["stream"] for row in passes}
    outside = sum(row["total_us"] for row in leaves if row["outside"])
    inside = sum(r["total_us"] for r in leaves if not r["outside"] and r["stream"] in streams)
    taken = sum(row["total_us"] for row in passes)
    other = passes[0] | {"name": "other", "spans": None, "total_us": taken - inside}
    return [
        {
            **{name: row[name] for name in ("name", "stream", "spans", "total_us")},
            "step_us": row["total_us"] / row["steps"],
            "share": row["total_us"] / ((taken + outside) or 1),
        }
        for row in (*leaves, other)
    ]
