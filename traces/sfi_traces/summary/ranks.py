"""Compares the ranks of one run: which are present, their steps, and how long their passes took."""

from typing import Any

from sfi_traces.summary.scope import Scope


def rank_facts(scope: Scope) -> dict[str, Any] | None:
    """Compare the ranks of a run; None for a single process.

    `forward_us` is the median time of a rank's decoding passes, waiting for other ranks included;
    `attention_us` is the mean time of all layers' attention in a pass.
    """
    trace = scope.trace
    if trace.ranks == 1:
        return None
    timed = scope.rows("""
        WITH passes AS (
            SELECT rank, request, step, sum(elapsed_us) FILTER (name = 'forward') AS forward_us,
                sum(elapsed_us) FILTER (name LIKE 'attention.%') AS attention_us, count(*) AS spans
            FROM timings GROUP BY rank, request, step
        )
        SELECT rank, sum(spans) AS spans,
            median(forward_us) FILTER ((request, step) NOT IN (FROM prefills)) AS forward_us,
            avg(attention_us) FILTER ((request, step) NOT IN (FROM prefills)) AS attention_us
        FROM passes GROUP BY rank
    """)
    found = {row["rank"]: row for row in timed}
    nothing = {"spans": 0, "forward_us": None, "attention_us": None}
    return {
        "size": trace.ranks,
        "missing": [rank for rank in range(trace.ranks) if rank not in trace.by_rank],
        "each": [
            {
                "rank": rank,
                "finished": one.manifest["finished"],
                "steps": len(one.table("steps", ["step"])),
                "selections": len(one.table("selections", ["step"])),
                **{name: found.get(rank, nothing)[name] for name in nothing},
            }
            for rank, one in trace.by_rank.items()
        ],
    }
