"""Rows of an evaluation as a Parquet file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sfi_traces.atomic_file import atomic_file
from sfi_traces.results.evaluation.summary import NAMES
from sfi_traces.results.parquet import write_rows

Row = Mapping[str, Any]

# types of columns that may hold only nulls; all others are floats
TEXT = ("method", "policy", "preset", "size", "task", "text", "finish_reason", "error")
INTEGERS = (
    "budget", "recent", "length", "seed", "prompt_tokens", "generated", "slow_steps", "fast_steps",
    "verifications", "drafted", "tested", "accepted",
)  # fmt: skip
LISTS, IDS = ("sentence_places", "sentence_scores"), ("token_ids",)


def flat(table: str, rows: Sequence[Row]) -> Sequence[Row]:
    """Return one row for each sample, or for each step of a window."""
    if table == "samples":
        return rows
    return [
        {
            **{name: row[name] for name in (*NAMES, "length")},
            "window": row["window"],
            **{name: values[step] for name, values in row["steps"].items() if name != "window"},
        }
        for row in rows
        if row["steps"] is not None
        for step in range(len(row["steps"]["step"]))
    ]


def write_table(path: Path, rows: Sequence[Row], table: str, manifest: Row) -> None:
    """Write rows that `flat` returned, at least one; table name and manifest go into the file's metadata."""
    facts = {"table": table, "manifest": json.dumps(manifest, ensure_ascii=False)}
    with atomic_file(path) as temporary:
        write_rows(temporary, rows, facts, text=TEXT, integers=INTEGERS, lists=LISTS, ids=IDS)
