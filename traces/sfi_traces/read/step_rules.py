"""Whether a trace's steps are what Algorithm 1 makes of its token ids."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.read.lossless_rules import REJECTED
from sfi_traces.read.reader import Trace

COLUMNS = [
    "request",
    "step",
    "token_id",
    "slow",
    "reason",
    "sentence",
    "trigger",
    "context_tokens",
    "draft_token_id",
]
SERVED = (
    "dense",
    "resumed",
)  # in a server: without a slot, or its cache was taken away and filled anew
DRAFTS = ("limit", "stop", "room")  # why a lossless run verifies besides


def broken_rules(trace: Trace) -> Iterator[str]:
    """Name the steps whose trigger, sentence or, under sfi, slowness is not what the tokens before give.

    Each step is judged by the steps before it as recorded, so that one wrong step is one line. A step that a
    server's lack of room made slow is taken as it is. So is a verification of a lossless run that rejected a
    token: what ended its draft may be a token that is not there. A verification whose draft ended for a
    reason of its own must have none of Eq. 5's.

    Args:
        trace: One with token ids, and each request's steps from 0 on without a gap.

    Raises:
        ConfigError: The trace has settings that this sfi does not know.
    """
    rules = trace.manifest["policy"] == "sfi"
    config = SfiConfig().replace(**trace.manifest["config"]) if rules else SfiConfig()
    trigger_ids = frozenset(trace.manifest["trigger_token_ids"])
    own = {
        prompt["request"]: Trigger(trigger_ids, config.replace(**prompt["settings"]))
        for prompt in trace.manifest.get("prompts", ())
        if rules and "settings" in prompt
    }
    rows = sorted(
        trace.table("steps", COLUMNS).to_pylist(), key=lambda row: (row["request"], row["step"])
    )
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
    # whether a slow step's reason does not follow from the tokens
    if lossless and (row["reason"] == REJECTED or row["draft_token_id"] is not None):
        return True
    if lossless and row["reason"] in DRAFTS:
        return not reason
    return row["reason"] in SERVED


def _kind(reason: str, *, slow: bool | None = None) -> str:
    if slow is None:
        slow = bool(reason)
    return f"slow ({reason})" if slow else "fast"
