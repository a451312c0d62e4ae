"""Where the time went: latency of steps, phases, and the context length from which SFI pays off."""

from typing import Any

from sfi_traces.model.request import Request

CONTAINERS = ("prefill", "forward")
REPLAYED = "SELECT count(*) AS n FROM chosen_steps WHERE graphs"
# what the requests of one step of a batch have in common; runs of one trace may be as long to the microsecond
BATCH_STEP = "(coalesce(batch, -1), coalesce(batch_step, step), elapsed_us)"
CHOSEN = f"(SELECT {BATCH_STEP} FROM chosen_steps LEFT JOIN batches USING (request))"  # noqa: S608 - our own words
KINDS = ("prefill", "slow", "fast", "mixed")


def latency(request: Request) -> dict[str, Any]:
    """Measure the time of the batch's steps by kind.

    Kind "prefill" is step 0 of a request; a step is "mixed" if it is slow for some requests of the batch and
    fast for others. An audit slows a step down, so a kind's unaudited steps are taken alone; `audited` says
    that there are none. `tokens_per_second` is over all steps from 1 on; in a lossless run, whose rejected
    drafts have no step, over the time from the first span of decoding to the end of the last.
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
            quantile_cont(elapsed_us, 0.5) AS p50_us,
            quantile_cont(elapsed_us, 0.95) AS p95_us,
            quantile_cont(elapsed_us, 0.99) AS p99_us
        FROM batch_steps
        GROUP BY kind, audited
        ORDER BY audited DESC
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


def batch_reads(request: Request) -> list[dict[str, Any]]:
    """Average what the batch's steps held and moved, by kind, from step 1 on; none for an import."""
    return request.query(f"""
        SELECT kind, count(*) AS n, avg(requests) AS requests, avg(cached_tokens) AS cached_tokens,
            avg(moved_bytes) AS moved_bytes
        FROM (
            SELECT
                CASE WHEN min(fast_requests) = 0 THEN 'slow' WHEN min(slow_requests) = 0 THEN 'fast'
                    ELSE 'mixed' END AS kind,
                min(slow_requests + fast_requests) AS requests, min(cached_tokens) AS cached_tokens,
                min(moved_bytes) AS moved_bytes
            FROM steps LEFT JOIN batches USING (request)
            WHERE step > 0 AND moved_bytes IS NOT NULL AND {BATCH_STEP} IN {CHOSEN}
            GROUP BY {BATCH_STEP}
        )
        GROUP BY kind
        ORDER BY kind = 'mixed', kind DESC
    """)  # noqa: S608 - our own words


def _spanned_us(request: Request) -> float:
    # from the first span of decoding to the end of the last, summed over runs; 0 without spans
    spanned = request.single("""
        WITH decoded AS (
            SELECT batch, min(batch_step) AS prompt, max(batch_step) AS last
            FROM timed_steps SEMI JOIN chosen_steps USING (request)
            GROUP BY batch
        ), spanned AS (
            SELECT max(begin_us + elapsed_us) - min(begin_us) AS us
            FROM chosen_timings timings JOIN decoded
            ON timings.request = batch AND timings.step > prompt AND timings.step <= last
            GROUP BY batch
        )
        SELECT coalesce(sum(us), 0) AS us FROM spanned
    """)
    return float(spanned["us"])


def phases(request: Request) -> dict[str, Any] | None:
    """Share out the time of the prefill and of decoding over the innermost spans.

    The whole is the forward passes and what is outside of them: sampling, shadow passes. "other" is what
    passes took beyond their layers' spans. Spans on another stream may overlap and count on top. `step_us` is
    the mean over the steps that have such a span.
    """
    rows = request.query("""
        SELECT (request, step) IN (FROM prefills) AS prefill, stream, name, layer IS NULL AS outside,
            count(*) AS spans, sum(elapsed_us) AS total_us, count(DISTINCT (request, step)) AS steps
        FROM chosen_timings
        GROUP BY ALL
        ORDER BY total_us DESC, name
    """)
    parts = {
        part: _shares([row for row in rows if row["prefill"] is prefill])
        for part, prefill in (("prefill", True), ("decode", False))
    }
    return parts if any(parts.values()) else None


def _shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
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


def break_even(request: Request) -> dict[str, Any]:
    """Find the context length at which a token costs as much under SFI as under full attention.

    What both do alike (projections, feed-forward, sampling) cancels. At a context of C tokens full attention
    takes b C a token. SFI takes F on a fast step; on a slow one, a share s of the steps from 1 on, it takes
    b C and refreshes for r C + P. Equal at

        s (b C + r C + P) + (1 - s) F = b C,  so  C = (s P + (1 - s) F) / ((1 - s) b - s r)

    with b the time of `attention.dense` per cached token, F that of `attention.fast` (and `select_before`)
    per fast step, r that of `selector` and `top_k` per cached token and P that of `pack` per refresh, all of
    one request's step, summed over the layers that are not left dense. b and r are ratios of sums: within a
    run the context varies too little to separate constant costs. Steps that are slow and fast in one kernel
    are not measured. A lossless run has no such length: its verifications attend with several queries, which
    says nothing of full attention's time for a token.
    """
    costs = _costs(request)
    share = request.single("SELECT avg(slow::INT) AS share FROM chosen_steps WHERE step > 0")["share"]
    facts = {"context_tokens": None, "slow_share": share, **costs, "reason": None}
    dense, fast = costs["dense_us_per_token"], costs["fast_us"]
    if share is None:
        return facts | {"reason": "no step after step 0 was recorded"}
    if request.trace.lossless:
        return facts | {"reason": "a lossless run's verifications attend with several queries"}
    if (dense is None or fast is None) and request.single(REPLAYED)["n"]:
        return facts | {"reason": "replayed steps have no phases (record with --set trace.spans=true)"}
    if dense is None or fast is None:
        kind = "slow" if dense is None else "fast"
        return facts | {"reason": f"no {kind} step after step 0 was timed"}
    select, pack = costs["select_us_per_token"] or 0.0, costs["pack_us"] or 0.0
    gain = (1 - share) * dense - share * select
    if gain <= 0:
        return facts | {"reason": "refreshes cost more than fast steps save, at any context length"}
    return facts | {"context_tokens": (share * pack + (1 - share) * fast) / gain}


def _costs(request: Request) -> dict[str, Any]:
    # spans are a batch's: their time is divided by the sums over the batch's requests
    query = """
        WITH spans AS (
            SELECT request AS batch, step,
                sum(elapsed_us) FILTER (name = 'attention.dense') AS dense_us,
                sum(elapsed_us) FILTER (name IN ('attention.fast', 'select_before')) AS fast_us,
                sum(elapsed_us) FILTER (name IN ('selector', 'top_k')) AS select_us,
                sum(elapsed_us) FILTER (name = 'pack') AS pack_us
            FROM chosen_timings
            WHERE step > 0 AND layer IS NOT NULL AND NOT list_contains(?::INT[], layer)
            GROUP BY request, step
            HAVING NOT bool_or(name = 'attention.mixed')
        ), contexts AS (
            SELECT batch, batch_step AS step, count(*) FILTER (slow) AS slow,
                count(*) FILTER (NOT slow) AS fast, sum(context_tokens) FILTER (slow) AS context
            FROM timed_steps WHERE step > 0
            GROUP BY batch, batch_step
        )
        SELECT sum(dense_us) / sum(context) AS dense_us_per_token,
            sum(fast_us) / sum(fast) AS fast_us,
            sum(select_us) / sum(context) AS select_us_per_token,
            sum(pack_us) / sum(slow) AS pack_us
        FROM spans JOIN contexts USING (batch, step)
    """
    return request.single(query, [request.trace.manifest["config"]["dense_layers"]])
