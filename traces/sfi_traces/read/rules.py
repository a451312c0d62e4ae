"""Checks that a trace's steps are slow where Algorithm 1 makes them so, and that verifications add up to steps."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.model.trace import Row, Trace

COLUMNS = ["request", "step", "token_id", "slow", "reason", "sentence", "trigger", "context_tokens", "draft_token_id"]
# a server's reasons: no slot is free; the cache was taken away and filled anew
SERVED = ("dense", "resumed")
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


LOSSLESS_COLUMNS = [
    "request",
    "step",
    "token_id",
    "slow",
    "reason",
    "context_tokens",
    "batch_step",
    "drafted",
    "draft_token_id",
]
REJECTED = "rejected"  # the reason of a verification right after one that rejected a token


def broken_sums(trace: Trace) -> Iterator[str]:
    """Name the verifications that contradict each other, or the steps that they gave.

    A verification that a killed run wrote without its steps is left out. Steps must be consecutive from 0 on.
    """
    given: dict[int, list[Row]] = defaultdict(list)
    verified: dict[int, list[Row]] = defaultdict(list)
    for found, name, columns in ((given, "steps", LOSSLESS_COLUMNS), (verified, "verifications", None)):
        rows = trace.table(name, columns).sort_by([("request", "ascending"), ("step", "ascending")])
        for row in rows.to_pylist():
            found[row["request"]].append(row)
    if not trace.lossless:
        if verified:
            yield f"a plain run must have no verifications, got {sum(map(len, verified.values())):,}"
        return
    for request in sorted(given.keys() | verified.keys()):
        steps, verifications = given[request], verified[request]
        if trace.manifest["finished"] is None:
            verifications = [row for row in verifications if row["step"] < len(steps)]
        for line in _of_request(trace, steps, verifications):
            yield f"request {request}, {line}"


def _of_request(trace: Trace, steps: list[Row], verifications: list[Row]) -> Iterator[str]:
    base, first, left = steps[0]["context_tokens"] if steps else 0, 1, 0
    # sfi selects anew in a slow step after a rejection; other policies may select in no slow step
    redoes = trace.manifest["policy"] == "sfi"
    for row in verifications:
        where = f"verification at step {row['step']}"
        rules = (
            _own_lines(trace, row),
            _chain_lines(row, base, left, redoes=redoes),
            _step_lines(row, steps[first : row["step"] + 1]),
            () if trace.redacted else _draft_lines(row, steps[first : row["step"] + 1], len(steps)),
        )
        for lines in rules:
            yield from (f"{where}: {line}" for line in lines)
        left = row["drafted"] - row["accepted"]
        base, first = row["base"] + row["accepted"] + 1, row["step"] + 1
    if first < len(steps):
        yield f"step {first}: must follow from a verification, got none"


def _own_lines(trace: Trace, row: Row) -> Iterator[str]:
    drafted, draft = row["drafted"], trace.manifest["config"].get("draft", {})
    most = draft.get("max_tokens", SfiConfig().draft.max_tokens)
    if not 0 <= row["accepted"] <= drafted:
        yield f"accepted must be in 0 to {drafted}, got {row['accepted']}"
    if not 0 <= drafted <= most:
        yield f"drafted must be in 0 to {most}, got {drafted}"


def _chain_lines(row: Row, base: int, left: int, *, redoes: bool) -> Iterator[str]:
    # `left`: drafted tokens that the verification before rejected or left untested
    if row["base"] != base:
        yield f"base must be {base:,}, got {row['base']:,}"
    again = row["reason"] == REJECTED
    if again and not (left and row["drafted"] == 0):
        yield f"reason must not be {REJECTED} with {left} tokens not kept before and {row['drafted']} drafted"
    if left and redoes and not again:
        yield f"reason must be {REJECTED} with {left} tokens not kept before, got {row['reason']}"


def _step_lines(row: Row, given: list[Row]) -> Iterator[str]:
    accepted = row["accepted"]
    if len(given) != accepted + 1:
        yield f"must give {accepted + 1} tokens, got {len(given)}"
        return
    *kept, last = given
    if not all(one["drafted"] and not one["slow"] for one in kept):
        yield f"the {accepted} tokens before its own must be drafted, in fast steps"
    if last["drafted"] or not last["slow"]:
        yield "its own token must not be drafted, and its step must be slow"
    expected = {"reason": row["reason"], "batch_step": row["batch_step"]}
    expected["context_tokens"] = row["base"] + accepted + 1
    for name, value in expected.items():
        if last[name] != value:
            yield f"{name} of its step must be {value}, got {last[name]}"


def _draft_lines(row: Row, given: list[Row], steps: int) -> Iterator[str]:
    for one in given[:-1]:
        draft, token = one["draft_token_id"], one["token_id"]
        if draft != token:
            yield f"step {one['step']} must keep the drafted token {draft}, got {token}"
    for last in given[-1:]:
        draft, token = last["draft_token_id"], last["token_id"]
        whole = row["accepted"] == row["drafted"]
        if whole and draft is not None:
            yield f"its own step must have no draft where all were accepted, got {draft}"
        # a drafted stop token that ends the request counts as the verification's own
        ends = draft == token and last["step"] + 1 == steps
        if not whole and draft in (None, token) and not ends:
            yield f"its own step must have another token than the drafted one, got {draft}"
