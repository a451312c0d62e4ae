"""Digests of what the readers of a trace say, for changes that must not change it.

    python benchmarks/trace_digests.py --traces DIR --record           records small traces in DIR, once
    python benchmarks/trace_digests.py --traces DIR --write FILE       before the change
    python benchmarks/trace_digests.py --traces DIR --compare FILE     after it: prints what differs

Times and floating point go into the digests: record, write and compare on one machine.
"""

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"COLUMNS": "140", "SOURCE_DATE_EPOCH": "0"}
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

from typer.testing import CliRunner  # noqa: E402

from benchmarks.compared import add_options, compared  # noqa: E402
from sfi_cli.app import app  # noqa: E402
from sfi_core import AuditConfig, EngineOptions, SfiConfig, generate, load  # noqa: E402
from sfi_core.bundled.example import load_example  # noqa: E402
from sfi_traces.model.trace import Trace  # noqa: E402
from sfi_traces.record.parquet import ParquetObserver  # noqa: E402
from sfi_traces.views.frames import passages, playable, strip  # noqa: E402
from tests.traces.imports import write_npz  # noqa: E402
from tests.traces.made import make_trace  # noqa: E402
from tests.traces.small import redact, rewrite  # noqa: E402

NEW, DIGITS = 40, 7
SMALL = {"sink": 4, "recent": 32, "budget": 48, "t_max": 9, "span": 0}
EVERY, SPARSE = AuditConfig(every=1, top=64), AuditConfig(every=3, top=64)
RUNS: dict[str, dict[str, Any]] = {  # of the bundled checkpoint
    "plain": {"audit": EVERY},
    "full-kv": {"audit": EVERY, "policy": "full-kv"},
    "sliding": {"audit": SPARSE, "config": {"recent_mode": "sliding"}, "rows": 1},
    "unaudited": {"rows": 1},
    "dense-layer": {"audit": EVERY, "config": {"dense_layers": (1,)}, "rows": 1},
    "freekv": {"audit": EVERY, "policy": "freekv", "config": {"freekv": {"page": 4}}},
    "streaming-llm": {"audit": EVERY, "policy": "streaming-llm", "rows": 1},
    "lossless": {"engine": EngineOptions(lossless=True)},
    "queue": {"audit": SPARSE, "max_batch": 1},
}


def record(folder: Path) -> None:
    """Record and make up the traces."""
    model, tokenizer = load()
    ids = tokenizer(load_example().prompt)["input_ids"]
    for name, run in RUNS.items():
        options = dict(run)
        config = SfiConfig().replace(**SMALL | options.pop("config", {}))
        rows = [ids[-300:], ids[-420:]][: options.pop("rows", 2)]
        with ParquetObserver(folder / name, tokenizer=tokenizer, positions=True) as observer:
            generate(model, tokenizer, rows, config, max_new_tokens=NEW, stop_token_ids=(),
                     observers=[observer], **options)  # fmt: skip
    for name, options in {
        "made": {"policy": "sfi", "requests": 2},
        "made-freekv": {"policy": "freekv"},
        "redacted": {"policy": "sfi"},
        "killed": {"policy": "freekv", "finished": None},
        "unplaced": {"policy": "sfi"},
        "server": {"policy": "sfi", "requests": 3},
    }.items():
        make_trace(folder / name, **options)
    redact(folder / "redacted")
    rewrite(folder / "killed", "steps", lambda rows: rows[:43])  # other tables reach further
    rewrite(folder / "unplaced", "selections", lambda rows: [r | {"positions": None} for r in rows])
    rewrite(folder / "server", "steps", _served)
    _said("import", write_npz(folder / "a.npz"), "--output", folder / "imported")


def _served(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # requests begin one after the other; some steps are slow for want of a slot, or after a preemption
    for row in rows:
        row["batch_step"] = row["step"] + 7 * row["request"]
        if reason := {23: "dense", 24: "dense", 35: "resumed"}.get(row["step"]):
            row |= {"slow": True, "reason": reason, "attended_tokens": row["context_tokens"]}
    return rows


def outputs(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield what each reader says of a trace."""
    trace = Trace.open(path)
    known = sorted(set(trace.table("steps", ["request"])["request"].to_pylist()))
    yield "show", _said("show", path, "--json")
    yield "show tables", _said("show", path)
    yield "show layer", _said("show", path, "--layer", 1, "--request", known[-1], "--json")
    yield "check", _said("check", path, "--json")
    yield "perfetto", _said("export", path, "--format", "perfetto")
    yield "replay", _said("replay", path, "--t-max", "4,9", "--budget", "12,24", "--json")
    yield "reuse", _said("replay", path, "--refresh-every", "1,2,4", "--json")
    for request in known:
        steps = trace.table("steps", ["request"])["request"].to_pylist().count(request)
        for step in range(0, steps, 3):
            where = ("--request", request, "--step", step)
            yield f"step {request} {step}", _said("show", path, *where, "--json")
        yield f"report {request}", _drawn("report", path, "--request", request, "page.html")
        yield f"player {request}", _played(trace, request)
    for kind in ("heatmap", "lag", "lambda", "retained", "timeline"):
        yield kind, _drawn("plot", path, "--kind", kind, f"{path.name}-{kind}.png")


def pairs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield what readers of two traces say."""
    for first, second in (("plain", "full-kv"), ("plain", "dense-layer"), ("freekv", "lossless"),
                          ("made", "server"), ("made-freekv", "killed"), ("redacted", "unplaced")):  # fmt: skip
        both = (folder / first, folder / second, "--request", 0)
        yield f"diff {first} {second}", _said("diff", *both, "--json")
        yield f"against {first} {second}", _said("replay", both[0], "--against", *both[1:], "--json")


def _played(trace: Trace, request: int) -> Any:
    # what the player shows beside a step's row: passages and strips
    try:
        run = playable(trace, request)
        names = ("part", "first", "last", "share", "mass", "text")
        shown = [
            [[getattr(passage, name) for name in names] for passage in passages(run, step)]
            for step in range(len(run.steps))
        ]
        drawn = [[part.tolist() for part in strip(run, step, 80).values()] for step in range(len(run.steps))]
        return _rounded(json.dumps([shown, drawn]))
    except Exception as error:  # noqa: BLE001
        return str(error)


def _said(*arguments: object) -> Any:
    ended = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        return f"{type(ended.exception).__name__}: {ended.exception}"
    try:
        return _rounded(ended.stdout)
    except ValueError:
        return ended.output


def _drawn(command: str, *arguments: object) -> Any:
    with TemporaryDirectory() as folder:
        file = Path(folder, str(arguments[-1]))
        said = _said(command, *arguments[:-1], "--output", folder if command == "plot" else file)
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else said


def _rounded(text: str) -> Any:
    # DuckDB's threads sum in any order
    return json.loads(text, parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))


def digests(folder: Path, only: str) -> Iterator[tuple[str, str]]:
    """Yield a digest for each reader and trace; works in `folder`, so that no path is in a digest."""
    os.chdir(folder)
    names = sorted(path.name for path in Path().iterdir() if path.is_dir() and only in path.name)
    for place in (*names, ""):
        for reader, said in outputs(Path(place)) if place else pairs(Path()):
            name = f"{place}: {reader}" if place else reader
            yield name, hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def main() -> int:
    """Record, write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--record", action="store_true")
    add_options(parser)
    options = parser.parse_args()
    if options.record:
        record(options.traces)
        return 0
    return compared(options, digests(options.traces, options.only))


if __name__ == "__main__":
    sys.exit(main())
