"""Checks that the ranks of a run recorded the same steps, and which ranks lack some."""

from collections.abc import Iterator
from typing import Any

from sfi_core.errors import TraceError
from sfi_traces.model.trace import Trace
from sfi_traces.record.folder import rank_folder

SAME = ("token_id", "slow", "reason")  # equal on every rank
KEY = ("request", "step")


def differing_steps(trace: Trace) -> Iterator[str]:
    """Name steps whose token, slowness or reason differ between ranks, and steps that finished ranks lack."""
    first = _steps(trace) if trace.others else {}
    for other in trace.others:
        rank, theirs = other.rank, _steps(other)
        for (request, step), ours in first.items():
            found = theirs.get((request, step), ours)
            for name in SAME:
                if found[name] != ours[name]:
                    yield (
                        f"request {request}, step {step}: {name} must be {ours[name]!r} on every rank, "
                        f"got {found[name]!r} on rank {rank}"
                    )
        if _whole(trace) and _whole(other) and first.keys() != theirs.keys():
            yield (f"rank {rank} must have the {len(first):,} steps of rank {trace.rank}, got {len(theirs):,}")


def lacking_ranks(trace: Trace) -> Iterator[str]:
    """Name the ranks that are missing here or ended before rank 0, as after a killed run."""
    if trace.rank:
        yield f"rank {trace.rank} of {trace.ranks} alone; the whole run's trace is {trace.path.parent}"
        return
    ours = _steps(trace)
    for rank in range(1, trace.ranks):
        other = trace.by_rank.get(rank)
        if other is None:
            lacking = "selections, supports and timings of its KV heads are missing"
            yield f"rank {rank} of {trace.ranks} has no trace here: {lacking}"
            continue
        if other.manifest["finished"] is None:
            yield f"rank {rank} not finished: it was killed, or goes on"
        elif other.manifest.get("stopped"):
            yield f"rank {rank} stopped early: {other.manifest['stopped']}"
        theirs = _steps(other)
        yield from _fewer(rank, ours, theirs)
        yield from _fewer(trace.rank, theirs, ours)


def file_prefix(trace: Trace, rank: int) -> str:
    """Return the path of a rank's files within the trace: "" for the rank that was opened."""
    return "" if rank == trace.rank else f"{rank_folder(trace.path, rank).name}/"


def _fewer(rank: int, wanted: dict[Any, Any], found: dict[Any, Any]) -> Iterator[str]:
    if lacking := sorted(wanted.keys() - found.keys()):
        request, step = lacking[0]
        yield f"rank {rank} lacks {len(lacking):,} steps, from step {step} of request {request} on"


def _whole(trace: Trace) -> bool:
    return trace.manifest["finished"] is not None and not trace.manifest.get("stopped")


def _steps(trace: Trace) -> dict[tuple[int, int], dict[str, Any]]:
    try:
        rows = trace.table("steps", [*KEY, *SAME]).to_pylist()
    except TraceError:  # `check` names the damaged parts
        return {}
    return {(row["request"], row["step"]): row for row in rows}
