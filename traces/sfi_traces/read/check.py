"""Checks that a trace is whole: its files, its columns, its steps."""

from collections.abc import Iterator
from itertools import count, islice, takewhile
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from sfi_core.errors import ConfigError
from sfi_traces.model.files import DAMAGED, open_part, read_part
from sfi_traces.model.trace import Trace
from sfi_traces.read.rules import broken_rules
from sfi_traces.schema import PART, TABLES

MOST = 10  # lines about steps that are shown
ROWS = 10_000  # in memory at once


def check(trace: Trace) -> dict[str, Any]:
    """Read every part of a trace, and check that its steps follow from its tokens.

    `problems` has a line for each fault; `notes` are about the sound rest of a killed run, and about what could not be
    checked.
    """
    tables = [_check_table(trace, name) for name in TABLES]
    problems = [line for table in tables for line in _table_problems(table)]
    recorded: list[dict[str, int]] = []
    unchecked: str | None = "the table steps cannot be read"
    faulty = ("damaged", "missing", "wrong", "faults")
    if not any(table[kind] for table in tables if table["table"] == "steps" for kind in faulty):
        recorded = _recorded(trace)
        gaps = [
            f"request {row['request']}: steps must be consecutive from 0 on, got {row['steps']} up to step "
            f"{row['last_step']}"
            for row in recorded
            if not row["steps"] == row.pop("distinct") == row["last_step"] + 1
        ]
        broken, unchecked = _check_steps(trace, whole=not gaps)
        problems += gaps + broken
    temporary = sorted(str(path.relative_to(trace.path)) for path in trace.path.rglob(".*.tmp"))
    return {
        "trace": str(trace.path),
        "sound": not problems,
        "finished": trace.manifest["finished"],
        "stopped": trace.manifest.get("stopped"),
        "tables": tables,
        "temporary": temporary,
        "recorded": recorded,
        "steps_checked": unchecked is None,
        "problems": problems,
        "notes": [*_notes(trace, tables, temporary), *([unchecked] if unchecked else [])],
    }


def _check_table(trace: Trace, name: str) -> dict[str, Any]:
    parts = trace.parts(name)
    expected = trace.manifest.get("tables", {}).get(name) if trace.manifest["finished"] else None
    facts: dict[str, Any] = {
        "table": name, "parts": len(parts), "rows": 0, "expected_rows": expected,
        "damaged": [], "absent": [], "missing": [], "wrong": [], "extra": [], "faults": [],
    }  # fmt: skip
    for part in parts:
        try:
            _check_part(part, TABLES[name], facts)
            if not facts["missing"] and not facts["wrong"]:
                read_part(part, name)
        except DAMAGED as error:
            if type(error) is ValueError:
                facts["faults"].append(f"{name}/{part.name} is damaged: {error}")
            else:
                facts["damaged"].append(f"{name}/{part.name}")
    present = {part.name for part in parts}
    lacking = (file for number in count() if (file := PART.format(number=number)) not in present)
    absent = takewhile(lambda file: file < max(present, default=""), lacking)
    facts["absent"] = [f"{name}/{file}" for file in islice(absent, MOST)]
    return facts


def _check_part(part: Path, schema: pa.Schema, facts: dict[str, Any]) -> None:
    open_part(part)
    with parquet.ParquetFile(part, page_checksum_verification=True) as file:
        written = file.schema_arrow
        facts["rows"] += sum(len(batch) for batch in file.iter_batches(ROWS))
    differ = {
        "missing": [name for name in schema.names if name not in written.names],
        "wrong": [
            f"{field.name} ({written.field(field.name).type}, not {field.type})"
            for field in schema
            if field.name in written.names and written.field(field.name).type != field.type
        ],
        "extra": [name for name in written.names if name not in schema.names],
    }
    for kind, names in differ.items():
        facts[kind] += [name for name in names if name not in facts[kind]]


def _table_problems(table: dict[str, Any]) -> Iterator[str]:
    name, expected = table["table"], table["expected_rows"]
    yield from (f"{part} is damaged or truncated" for part in table["damaged"])
    yield from table["faults"]
    yield from (f"{part} is missing" for part in table["absent"])
    yield from (f"{name} lacks the column {column}" for column in table["missing"])
    yield from (f"{name} has a column of another type: {column}" for column in table["wrong"])
    whole = not (table["damaged"] or table["faults"] or table["absent"])
    if whole and expected is not None and expected != table["rows"]:
        yield f"{name} must have {expected:,} rows, got {table['rows']:,}"


def _recorded(trace: Trace) -> list[dict[str, int]]:
    steps = trace.table("steps", ["request", "step"]).group_by("request")
    counted = steps.aggregate([("step", "count"), ("step", "max"), ("step", "count_distinct")])
    names = ["request", "steps", "last_step", "distinct"]
    return counted.rename_columns(names).sort_by("request").to_pylist()  # type: ignore[no-any-return]


def _check_steps(trace: Trace, *, whole: bool) -> tuple[list[str], str | None]:
    # a line for each broken rule; or why the steps were not checked
    if not whole:
        return [], "steps not checked against their tokens: some are missing"
    if trace.redacted:
        why = "steps not checked against their tokens: token ids were left out (trace.redact_text)"
        return [], why
    try:
        return _first_lines(broken_rules(trace)), None
    except ConfigError as error:
        return [], f"steps not checked against their tokens: {error}"


def _first_lines(broken: Iterator[str]) -> list[str]:
    lines = list(broken)
    more = [f"{len(lines) - MOST:,} more steps break a rule"] if len(lines) > MOST else []
    return lines[:MOST] + more


def _notes(trace: Trace, tables: list[dict[str, Any]], temporary: list[str]) -> Iterator[str]:
    if trace.manifest["finished"] is None:
        yield "not finished: the run was killed, or goes on"
    elif trace.manifest.get("stopped"):
        yield f"stopped early: {trace.manifest['stopped']}"
    for table in tables:
        if table["extra"]:
            yield f"{table['table']} has columns of a newer sfi: {', '.join(table['extra'])}"
    if temporary:
        yield f"left over from a write that broke off: {', '.join(temporary)}"
