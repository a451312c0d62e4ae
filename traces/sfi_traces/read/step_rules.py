"""Checks that a trace's steps are slow where Algorithm 1 makes them so, and the same on every rank."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sfi_core.errors import TraceError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.model.trace import Trace
from sfi_traces.read.lossless_rules import REJECTED
from sfi_traces.record.folder import rank_folder

COLUMNS = ["request", "step", "token_id", "slow", "reason", "sentence", "trigger", "context_tokens", "draft_token_id"]
# a server's reasons: no slot is free; the cache was taken away and filled anew
SERVED = ("dense", "resumed")
DRAFTS = ("limit", "stop", "room")  # a lossless run's own reasons to verify
SAME = ("token_id", "slow", "reason")  # equal on every rank
KEY = ("request", "step")


def broken_rules(trace: Trace) -> Iterator[str]:
    """Name the steps whose trigger, sentence or (policy sfi) slowness does not follow from the tokens before.

    Each step is judged by the recorded steps before it, so that a wrong step is one line. Accepted as they
    are: slow steps that a server had no room for, and a lossless run's verifications that rejected a token,
    whose cause may be that token. A verification that its draft's length, end or room caused must not also be
    due by Eq. 5. Requires token ids, and consecutive steps from 0 on.

    Raises `ConfigError` for a trace with settings that this sfi does not know.
    """
    rules = trace.manifest["policy"] == "sfi"
    config = SfiConfig().replace(**trace.manifest["config"]) if rules else SfiConfig()
    trigger_ids = frozenset(trace.manifest["trigger_token_ids"])
    own = {
        prompt["request"]: Trigger(trigger_ids, config.replace(**prompt["settings"]))
        for prompt in trace.manifest.get("prompts", ())
        if rules and "settings" in prompt
    }
    rows = sorted(trace.table("steps", COLUMNS).to_pylist(), key=lambda row: (row["request"], row["step"]))
    for request, steps in groupby(rows, key=lambda row: row["request"]):
        trigger = own.get(request, Trigger(trigger_ids, config))
        state, sentence = RequestState(), 0
        for row in steps:
            state.prompt_tokens = state.prompt_tokens or row["context_tokens"]
            where = f"request {row['request']}, step {row['step']}"
            ends = row["token_id"] in trigger.token_ids
            if row["trigger"] is not ends:
                yield f"{where}: trigger must be {ends}, got {row['trigger']}"
            if row["sentence"] != sentence:
                yield f"{where}: sentence must be {sentence}, got {row['sentence']}"
            if rules:
                reason = trigger.reason(state)
                unknown = row["slow"] and _unknown(row, reason, lossless=trace.lossless)
                if not unknown and (bool(reason), reason) != (row["slow"], row["reason"]):
                    yield f"{where}: must be {_kind(reason)}, got {_kind(row['reason'], slow=row['slow'])}"
            state.begin(slow=row["slow"], reason=row["reason"], new_tokens=1)
            state.finish_step(row["token_id"])
            sentence += ends


def _unknown(row: dict[str, Any], reason: str, *, lossless: bool) -> bool:
    # whether the tokens alone cannot say if the slow step is right
    if lossless and (row["reason"] == REJECTED or row["draft_token_id"] is not None):
        return True
    if lossless and row["reason"] in DRAFTS:
        return not reason
    return row["reason"] in SERVED


def _kind(reason: str, *, slow: bool | None = None) -> str:
    if slow is None:
        slow = bool(reason)
    return f"slow ({reason})" if slow else "fast"


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
