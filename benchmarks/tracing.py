"""What tracing costs: decode time and bytes on disk, in one process, interleaved.

    python benchmarks/tracing.py --output benchmarks/results/NAME.json
    python benchmarks/tracing.py --dry-run      a few steps on a CPU, to see that it runs

Every way runs without CUDA graphs but "off, graphs" and "trace, graphs", the default on a GPU.
The bundled example, decoded without observers and under each way of recording, in turns. `ratio` compares the
mean step, `median_ratio` the median one: the median over the turns of a way's step to that of "off" in the
same turn. "off, again" is a second run without observers: the distance of its ratio from 1 is the noise
of the others.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import sfi_core
from sfi_core.bundled.example import load_example
from sfi_core.machine.memory import describe
from sfi_core.machine.versions import versions
from sfi_core.models.load import load, quiet, resolve_device
from sfi_core.settings.engine import AuditConfig, EngineOptions
from sfi_traces.record.parquet import ParquetObserver

OFF = "off"
WAYS: dict[str, dict[str, Any]] = {
    OFF: {},
    "off, again": {},
    "off, graphs": {"graphs": True},
    "trace, graphs": {"trace": {"positions": False}, "graphs": True},
    "nvtx, no profiler": {"nvtx": True},
    "trace": {"trace": {"positions": False}},
    "trace --positions": {"trace": {"positions": True}},
    "trace --audit 16": {"trace": {}, "audit": AuditConfig(every=16)},
    "trace --audit 1": {"trace": {}, "audit": AuditConfig(every=1)},
}
STEPS, DRY_STEPS = 200, 4  # nothing stops the example: more steps, less noise


def ways_on(device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the ways that can be measured, and say which cannot."""
    lacking = {}
    if device.type != "cuda":
        lacking |= {way: "needs a CUDA device" for way in WAYS if way.endswith(", graphs")}
    if find_spec("nvtx") is None:
        lacking["nvtx, no profiler"] = "needs the nvtx package"
    for way, why in lacking.items():
        print(f"{way:<18} {why}", flush=True)
    return {way: settings for way, settings in WAYS.items() if way not in lacking}


def run_once(run: Callable[..., Any], way: dict[str, Any], folder: Path) -> dict[str, float]:
    """Decode once; return what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        observers = []
        if "nvtx" in way:
            observers.append(import_module("sfi_traces.record.nvtx").NvtxObserver())
        if "trace" in way:
            observers.append(stack.enter_context(ParquetObserver(folder, **way["trace"])))
        at: list[float] = []
        run(
            observers=observers,
            audit=way.get("audit"),
            engine=EngineOptions(graphs=way.get("graphs", False)),
            on_token=lambda _: at.append(time.perf_counter()),
        )
    seconds = [after - before for before, after in pairwise(at)]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {"mean": statistics.fmean(seconds), "median": statistics.median(seconds), "bytes": size, "steps": len(at)}


def measure(device: torch.device, steps: int, repeats: int) -> list[dict[str, Any]]:
    """Interleave all ways; report medians."""
    example = load_example()
    model, tokenizer = load(device=str(device))
    folder = Path(tempfile.mkdtemp()) / "trace"
    run = partial(
        sfi_core.generate, model, tokenizer, [example.prompt], example.config, stop_token_ids=(), max_new_tokens=steps
    )
    ways = ways_on(device)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for way, settings in ways.items():
            timing = run_once(run, settings, folder)
            runs[way] += [timing] if repeat else []
    rows = []
    for way, timings in runs.items():
        ratios = {
            kind: [timing[kind] / off[kind] for timing, off in zip(timings, runs[OFF], strict=True)]
            for kind in ("mean", "median")
        }
        row = {
            "way": way,
            "step_ms": 1e3 * statistics.median(timing["mean"] for timing in timings),
            "median_step_ms": 1e3 * statistics.median(timing["median"] for timing in timings),
            "ratio": statistics.median(ratios["mean"]),
            "ratio_quartiles": quartiles(ratios["mean"]),
            "median_ratio": statistics.median(ratios["median"]),
            "median_ratio_quartiles": quartiles(ratios["median"]),
            "trace_bytes": timings[-1]["bytes"],
            "bytes_per_token": timings[-1]["bytes"] / timings[-1]["steps"],
        }
        rows.append(row)
        print(
            f"{way:<18} {row['step_ms']:7.2f} ms a step, {row['ratio']:.3f}x; median step "
            f"{row['median_step_ms']:7.2f} ms, {row['median_ratio']:.3f}x; {row['trace_bytes']:,} bytes",
            flush=True,
        )
    return rows


def quartiles(values: list[float]) -> list[float]:
    """Return the quartiles of some values, of which there may be one."""
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    quiet()
    device = resolve_device("cpu" if arguments.dry_run else "auto")
    rows = measure(device, DRY_STEPS if arguments.dry_run else STEPS, arguments.repeats)
    document = {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the day on this machine
        "model": "bundled",
        "repeats": arguments.repeats,
        "rows": rows,
        "machine": describe(),
        "versions": versions(),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
