"""Traces written row by row, for tests that need exact numbers."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sfi_traces.model.request import Request
from sfi_traces.model.trace import Trace
from sfi_traces.replay import Outcome
from sfi_traces.schema import MANIFEST, TABLES
from sfi_traces.summary import sections
from tests.traces.made import make_trace

STEP = {
    "position": 0, "token_id": 1, "token_text": "a", "reason": "", "steps_since_slow": 0, "sentence": 0,
    "trigger": False, "attended_tokens": 10.0, "context_tokens": 100, "read_ratio": 0.1, "elapsed_us": 1.0,
    "audited": False,
}  # fmt: skip


def write_trace(folder: Path, tables, **manifest) -> Path:
    """Write a trace of given rows; what a row does not name is null, or `STEP`'s in `steps`."""
    make_trace(folder, **({"steps": 1, "policy": "sfi"} | manifest))
    for name in TABLES:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name, rows in tables.items():
        write_part(folder, name, [STEP | row if name == "steps" else row for row in rows])
    return folder


def write_part(folder: Path, name: str, rows: list[dict], number: int = 0) -> Path:
    (folder / name).mkdir(exist_ok=True)
    part = folder / name / f"part-{number:05d}.parquet"
    parquet.write_table(pa.Table.from_pylist(rows, schema=TABLES[name]), part)
    return part


def fixed_folder(**options):
    """A fixture: the folder of a made-up trace that no test of the module changes."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory) -> Path:
        return make_trace(tmp_path_factory.mktemp("made") / "run", **options)

    return folder


def fixed_trace(**options):
    """A fixture: a made-up trace that no test of the module changes, opened."""

    @pytest.fixture(scope="module")
    def trace(tmp_path_factory) -> Trace:
        return Trace.open(make_trace(tmp_path_factory.mktemp("made") / "run", **options))

    return trace


def change_manifest(folder: Path, **changes) -> Path:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))
    return folder


def rewrite(folder: Path, table: str, change) -> None:
    write_part(folder, table, change(parquet.read_table(folder / table / "part-00000.parquet").to_pylist()))


def redact(folder: Path) -> Path:
    shutil.rmtree(folder / "prompts", ignore_errors=True)
    rewrite(folder, "steps", lambda steps: [row | {"token_id": None, "token_text": None} for row in steps])
    prompts = [p | {"sha256": None} for p in json.loads((folder / MANIFEST).read_text())["prompts"]]
    return change_manifest(folder, redacted=True, prompts=prompts)


def spoil(part: Path) -> Path:
    """Cut a part's end off, as a full disk or a crash does."""
    part.write_bytes(part.read_bytes()[:-20])
    return part


def rows(trace: Trace, name: str, **wanted) -> list[dict]:
    return [row for row in trace.table(name).to_pylist() if wanted.items() <= row.items()]


def section(trace: Trace, name: str, request: int | None = None, layer: int | None = None):
    """One section of a trace's summary, without the work of the others."""
    return sections(Request.of(trace, request, layer), [name])[name]


def last_of_bin(number: int) -> int:
    """Last number of the bin of a number: 1, 2, 3-4, 5-8, ..."""
    return 1 if number <= 1 else 2 ** math.ceil(math.log2(number))


def outcome(**values) -> Outcome:
    """A replay's outcome with these values, and with zeros."""
    return Outcome(**dict.fromkeys(Outcome.__slots__, 0) | values)


def assert_spread(spread: dict, values: list[float]) -> None:
    assert spread["n"] == len(values)
    expected = {
        "mean": np.mean(values), "sd": np.std(values, ddof=1), "min": min(values), "max": max(values),
        "p5": np.quantile(values, 0.05), "p50": np.quantile(values, 0.5), "p95": np.quantile(values, 0.95),
    }  # fmt: skip
    assert {name: spread[name] for name in expected} == pytest.approx(expected, abs=1e-6)
