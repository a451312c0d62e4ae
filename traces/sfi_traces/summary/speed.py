"""Where the time went: latency of steps, and phases."""

from typing import Any

from sfi_traces.model.request import Request

CONTAINERS = ("prefill", "forward")
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
