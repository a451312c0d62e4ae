"""What tracing costs: decode time and bytes on disk, in one process, interleaved.

    python benchmarks/tracing.py --output benchmarks/results/NAME.json

The bundled example, decoded without observers and under each way of recording, in turns. `ratio` compares the
mean step, `median_ratio` the median one: the median over the turns of a way's step to that of "off" in the
same turn. "off, again" is a second run without observers: the distance of its ratio from 1 is the noise
of the others. With `--model qwen3-0.6b` a model of that size with random weights decodes a random prompt.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import sfi_core
from sfi_core import SfiConfig
from sfi_core.bundled.example import load_example
from sfi_core.machine.describe import describe
from sfi_core.machine.versions import versions
from sfi_core.measure.bench.architectures import random_config, random_model
from sfi_core.models.load import load, quiet, resolve_device
from sfi_core.settings.audit import AuditConfig
from sfi_traces.record.nvtx import NvtxObserver
from sfi_traces.record.parquet import ParquetObserver

OFF = "off"
WAYS: dict[str, dict[str, Any]] = {
    OFF: {},
    "off, again": {},
    "nvtx, no profiler": {"nvtx": True},
    "trace": {"trace": {"positions": False}},
    "trace --positions": {"trace": {"positions": True}},
    "trace --audit 16": {"trace": {}, "audit": AuditConfig(every=16)},
    "trace --audit 1": {"trace": {}, "audit": AuditConfig(every=1)},
}
PROMPT = 4096  # tokens of the random prompt


def subject(name: str, device: Any) -> tuple[Any, Any, Sequence[Any], SfiConfig, dict[str, Any]]:
    """Return model, tokenizer, prompts, settings and options of a run."""
    if name == "bundled":
        example = load_example()
        model, tokenizer = load(device=str(device))
        # nothing stops it: more steps, less noise
        return model, tokenizer, [example.prompt], example.config, {"max_new_tokens": 200}
    torch.manual_seed(0)
    model = random_model(random_config("qwen3-0.6b"), device, torch.bfloat16)
    ids = torch.randint(0, model.config.vocab_size, (PROMPT,)).tolist()
    config = SfiConfig(trigger_policy="stride", stride=20, slow_start=1, span=0)
    return model, None, [ids], config, {"max_new_tokens": 41}


def run_once(run: Callable[..., Any], way: dict[str, Any], folder: Path) -> dict[str, float]:
    """Decode once; return what it took."""
    shutil.rmtree(folder, ignore_errors=True)
    with ExitStack() as stack:
        observers = [NvtxObserver()] if "nvtx" in way else []
        if "trace" in way:
            observers.append(stack.enter_context(ParquetObserver(folder, **way["trace"])))
        at: list[float] = []
        run(
            observers=observers,
            audit=way.get("audit"),
            on_token=lambda _: at.append(time.perf_counter()),
        )
    seconds = [after - before for before, after in pairwise(at)]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return {
        "mean": statistics.fmean(seconds),
        "median": statistics.median(seconds),
        "bytes": size,
        "steps": len(at),
    }


def measure(name: str, device: Any, repeats: int) -> list[dict[str, Any]]:
    """Interleave all ways; report medians."""
    model, tokenizer, prompts, config, options = subject(name, device)
    folder = Path(tempfile.mkdtemp()) / "trace"

    def run(**observed: Any) -> Any:
        return sfi_core.generate(
            model, tokenizer, prompts, config, stop_token_ids=(), **options, **observed
        )

    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):  # the first is a warm-up
        for way, settings in WAYS.items():
            one = run_once(run, settings, folder)
            runs[way] += [one] if repeat else []
    rows = []
    for way, found in runs.items():
        ratios = {
            kind: [one[kind] / off[kind] for one, off in zip(found, runs[OFF], strict=True)]
            for kind in ("mean", "median")
        }
        row = {
            "way": way,
            "step_ms": 1e3 * statistics.median(one["mean"] for one in found),
            "median_step_ms": 1e3 * statistics.median(one["median"] for one in found),
            "ratio": statistics.median(ratios["mean"]),
            "ratio_quartiles": statistics.quantiles(ratios["mean"], n=4),
            "median_ratio": statistics.median(ratios["median"]),
            "median_ratio_quartiles": statistics.quantiles(ratios["median"], n=4),
            "trace_bytes": found[-1]["bytes"],
            "bytes_per_token": found[-1]["bytes"] / found[-1]["steps"],
        }
        rows.append(row)
        print(
            f"{way:<18} {row['step_ms']:7.2f} ms a step, {row['ratio']:.3f}x; median step "
            f"{row['median_step_ms']:7.2f} ms, {row['median_ratio']:.3f}x; {row['trace_bytes']:,} bytes",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", choices=["bundled", "qwen3-0.6b"], default="bundled")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    quiet()
    rows = measure(arguments.model, resolve_device(arguments.device), arguments.repeats)
    document = {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the day on this machine
        "model": arguments.model,
        "repeats": arguments.repeats,
        "rows": rows,
        "machine": describe(),
        "versions": versions(),
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
