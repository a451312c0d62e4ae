"""What was run, how its steps went, and which tokens triggered slow steps."""

from typing import Any

from sfi_core.settings.config import changed_settings
from sfi_traces.model.request import Request
from sfi_traces.summary.lossless import lossless_reads

FROM_MANIFEST = [
    "policy", "preset", "backend", "device", "redacted", "created", "finished", "stopped", "audit",
    "graphs", "not_replayed",
]  # fmt: skip


def run_facts(request: Request) -> dict[str, Any]:
    """Describe the run from its manifest, and count its recorded steps."""
    manifest = request.trace.manifest
    recorded = request.query("SELECT request, count(*) AS steps FROM chosen_steps GROUP BY 1 ORDER BY 1")
    prompts = {prompt["request"]: prompt["tokens"] for prompt in manifest["prompts"]}
    return {
        "model": manifest["model"]["name"],
        "architecture": manifest["model"]["architecture"],
        **{name: getattr(request.trace, name) for name in ("lossless", "imported")},
        **{key: manifest.get(key) for key in FROM_MANIFEST},
        "settings": changed_settings(manifest["config"]),
        "requests": [
            {"request": one["request"], "prompt_tokens": prompts.get(one["request"]), "steps": one["steps"]}
            for one in recorded
        ],
    }


def answers(request: Request) -> list[dict[str, Any]]:
    """Join the generated tokens of each request; the text of a redacted one is None."""
    return request.query("""
        SELECT request, string_agg(token_text, '' ORDER BY step) AS text FROM chosen_steps
        GROUP BY request ORDER BY request
    """)


def step_facts(request: Request) -> dict[str, Any]:
    """Count steps by reason, and what those from step 1 on read.

    `slow_share` is `slow` over `steps`. `read_ratio` is attended tokens over context tokens, both summed, in a lossless
    run with what drafts and verifications read for rejected tokens; `selection_ratio` is what choosing read over the
    same, None in a trace that does not tell; `cache_read_ratio` is the sum. `launched` counts the steps from 1 on that
    report whether they were replayed as CUDA graphs, `replayed` those that were.
    """
    counts = request.single("""
        SELECT
            count(*) AS steps,
            count(*) FILTER (slow) AS slow,
            count(*) FILTER (NOT slow) AS fast,
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
        SELECT reason, count(*) AS steps FROM chosen_steps WHERE slow
        GROUP BY reason ORDER BY steps DESC, reason
    """)
    if request.trace.lossless:
        counts |= lossless_reads(request)
    return counts | {"reasons": {row["reason"]: row["steps"] for row in reasons}}


def trigger_tokens(request: Request) -> list[dict[str, Any]]:
    """Count the generated tokens of T_trig, and the share of them that a slow step followed.

    It is expected `1 + trigger_delay` steps after; tokens too near the end do not count. In a redacted trace
    all tokens are one row.
    """
    query = """
        SELECT token_id, token_text, count(*) AS count, avg(after::INT) AS slow_after
        FROM (
            SELECT *, lead(slow, ?) OVER (PARTITION BY request ORDER BY step) AS after FROM chosen_steps
        )
        WHERE trigger
        GROUP BY token_id, token_text
        ORDER BY count DESC, token_id
    """
    return request.query(query, [1 + request.trace.manifest["config"]["trigger_delay"]])
