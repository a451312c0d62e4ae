"""Checks that a trace is whole, and that its steps are slow where Algorithm 1 makes them so."""

from collections.abc import Iterator
from itertools import count, groupby, islice, takewhile
from typing import Any

from pyarrow import parquet

from sfi_core.errors import ConfigError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.model.files import DAMAGED, open_part, read_part
from sfi_traces.model.trace import Row, Trace
from sfi_traces.schema import PART, TABLES

MOST = 10  # lines about steps that are shown
ROWS = 10_000  # in memory at once
COLUMNS = ["request", "step", "token_id", "slow", "reason", "sentence", "trigger", "context_tokens", "draft_token_id"]
# a server's reasons: no slot is free; the cache was taken away and filled anew
SERVED = ("dense", "resumed")
REJECTED = "rejected"  # the reason of a verification right after one that rejected a token
DRAFTS = ("limit", "stop", "room")  # a lossless run's own reasons to verify


def check(trace: Trace) -> dict[str, Any]:
    """Read every part of a trace, and check that its steps follow from its tokens.

    `problems` has a line for each fault; `notes` are about the sound rest of a killed run, and about what could not be
    checked.
    """
    notes = []
    if trace.manifest["finished"] is None:
        notes.append("not finished: the run was killed, or goes on")
    elif trace.manifest.get("stopped"):
        notes.append(f"stopped early: {trace.manifest['stopped']}")
    checked = {name: _check_table(trace, name) for name in TABLES}
    problems = [line for _, faults, _ in checked.values() for line in faults]
    newest = {name: ", ".join(newer) for name, (_, _, newer) in checked.items() if newer}
    notes += [f"{name} has columns of a newer sfi: {newer}" for name, newer in newest.items()]
    if temporary := sorted(str(path.relative_to(trace.path)) for path in trace.path.rglob(".*.tmp")):
        notes.append(f"left over from a write that broke off: {', '.join(temporary)}")
    broken = checked["steps"][1]
    recorded, rules, unchecked = ([], [], "their table has problems") if broken else _check_steps(trace)
    problems += rules
    notes += [f"steps not checked against their tokens: {unchecked}"] if unchecked else []
    end = {name: trace.manifest.get(name) for name in ("finished", "stopped")}
    tables = [table for table, _, _ in checked.values()]
    lines = {"steps_checked": not unchecked, "problems": problems, "notes": notes}
    return {"trace": str(trace.path), "sound": not problems, **end, "tables": tables, "recorded": recorded, **lines}


def _check_table(trace: Trace, name: str) -> tuple[Row, list[str], list[str]]:
    # a table's facts, a line for each fault, and columns that this sfi does not know
    parts, rows = trace.parts(name), 0
    lines: list[str] = []
    newer: list[str] = []
    for part in parts:
        wrong: list[str] = []
        try:
            open_part(part)
            with parquet.ParquetFile(part, page_checksum_verification=True) as file:
                written = file.schema_arrow
                rows += sum(len(batch) for batch in file.iter_batches(ROWS))
            newer += [column for column in written.names if column not in {*TABLES[name].names, *newer}]
            for field in TABLES[name]:
                if field.name not in written.names:
                    wrong.append(f"{name} lacks the column {field.name}")
                elif (kind := written.field(field.name).type) != field.type:
                    wrong.append(f"{name} has a column of another type: {field.name} ({kind}, not {field.type})")
            if not wrong:
                read_part(part, name)
        except DAMAGED as error:
            how = f"damaged: {error}" if type(error) is ValueError else "damaged or truncated"
            wrong.append(f"{name}/{part.name} is {how}")
        lines += [line for line in wrong if line not in lines]
    present, last = {part.name for part in parts}, parts[-1].name if parts else ""
    files = takewhile(lambda file: file < last, map(PART.format, count()))
    lines += islice((f"{name}/{file} is missing" for file in files if file not in present), MOST)
    expected = trace.manifest.get("tables", {}).get(name) if trace.manifest["finished"] else None
    if not lines and expected not in (None, rows):
        lines.append(f"{name} must have {expected:,} rows, got {rows:,}")
    return {"table": name, "parts": len(parts), "rows": rows, "expected_rows": expected}, lines, newer


def _check_steps(trace: Trace) -> tuple[list[Row], list[str], str | None]:
    # the steps of each request, a line for each broken rule, and why not all steps were checked
    steps = trace.table("steps", ["request", "step"]).group_by("request")
    counted = steps.aggregate([("step", "count"), ("step", "max"), ("step", "count_distinct")])
    names = ["request", "steps", "last_step", "distinct"]
    recorded: list[Row] = counted.rename_columns(names).sort_by("request").to_pylist()
    gaps = [
        f"request {row['request']}: steps must be consecutive from 0 on, got {row['steps']} up to step "
        f"{row['last_step']}"
        for row in recorded
        if not row["steps"] == row.pop("distinct") == row["last_step"] + 1
    ]
    if gaps:
        return recorded, gaps, "some are missing"
    if trace.redacted:
        return recorded, [], "token ids were left out (trace.redact_text)"
    try:
        lines = list(_broken_rules(trace))
    except ConfigError as error:
        return recorded, [], str(error)
    more = [f"{len(lines) - MOST:,} more steps break a rule"] if len(lines) > MOST else []
    return recorded, lines[:MOST] + more, None


def _broken_rules(trace: Trace) -> Iterator[str]:
    """Name the steps whose trigger, sentence or (policy sfi) slowness does not follow from the tokens before.

    Each step is judged by the recorded steps before it, so that a wrong step is one line. Accepted as they
    are: slow steps that a server had no room for, and a lossless run's verifications that rejected a token,
    whose cause may be that token. A verification that its draft's length, end or room caused must not also be
    due by Eq. 5. Raises `ConfigError` for a trace with settings that this sfi does not know.
    """
    rules = trace.manifest["policy"] == "sfi"
    config = SfiConfig().replace(**trace.manifest["config"]) if rules else SfiConfig()
    trigger_ids = frozenset(trace.manifest["trigger_token_ids"])
    triggers = {
        prompt["request"]: Trigger(trigger_ids, config.replace(**prompt["settings"]))
        for prompt in trace.manifest.get("prompts", ())
        if rules and "settings" in prompt
    }
    rows = sorted(trace.table("steps", COLUMNS).to_pylist(), key=lambda row: (row["request"], row["step"]))
    for request, steps in groupby(rows, key=lambda row: row["request"]):
        trigger = triggers.get(request, Trigger(trigger_ids, config))
        state, sentence = RequestState(), 0
        for row in steps:
            state.prompt_tokens = state.prompt_tokens or row["context_tokens"]
            where = f"request {request}, step {row['step']}"
            ends = row["token_id"] in trigger.token_ids
            if row["trigger"] is not ends:
                yield f"{where}: trigger must be {ends}, got {row['trigger']}"
            if row["sentence"] != sentence:
                yield f"{where}: sentence must be {sentence}, got {row['sentence']}"
            if rules:
                reason = trigger.reason(state)
                unknown = row["slow"] and _unknown(row, reason, lossless=trace.lossless)
                if not unknown and (bool(reason), reason) != (row["slow"], row["reason"]):
                    must, got = _kind(bool(reason), reason), _kind(row["slow"], row["reason"])
                    yield f"{where}: must be {must}, got {got}"
            state.begin(slow=row["slow"], reason=row["reason"], new_tokens=1)
            state.finish_step(row["token_id"])
            sentence += ends


def _unknown(row: Row, reason: str, *, lossless: bool) -> bool:
    # whether the tokens alone cannot say if the slow step is right
    if lossless and (row["reason"] == REJECTED or row["draft_token_id"] is not None):
        return True
    if lossless and row["reason"] in DRAFTS:
        return not reason
    return row["reason"] in SERVED


def _kind(slow: bool, reason: str) -> str:
    return f"slow ({reason})" if slow else "fast"
