"""Checks that a trace's steps are slow where Algorithm 1 makes them so."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.model.trace import Trace

COLUMNS = ["request", "step", "token_id", "slow", "reason", "sentence", "trigger", "context_tokens", "draft_token_id"]
# a server's reasons: no slot is free; the cache was taken away and filled anew
SERVED = ("dense", "resumed")
REJECTED = "rejected"  # the reason of a verification right after one that rejected a token
DRAFTS = ("limit", "stop", "room")  # a lossless run's own reasons to verify


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
