"""Decode one saved model with sfi, transformers and kvpress, run by run in turn, each in its own environment.

    python benchmarks/peers.py --output benchmarks/results/NAME.json

kvpress needs transformers before 5.3 and sfi a newer one, so this script makes a virtual environment for
kvpress (`--environment`, kept for the next time), with the PyTorch version of ours. The model has random
weights and is saved once; prompts are random tokens that every run, a process of its own, really reads. On a
CPU, in float32.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from sfi_core.machine.memory import describe
from sfi_core.measure.bench.architectures import random_config, random_model
from sfi_core.settings.config import SfiConfig

WORKER = Path(__file__).with_name("peer_worker.py")
SMALL: dict[str, Any] = {  # about 50 million weights
    "model_type": "qwen3", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = {"budget": 256, "recent": 128, "trigger_policy": "stride", "stride": 20}
KVPRESS = "kvpress==0.5.*"
OURS, THEIRS = "sfi's", "kvpress'"
METHODS: dict[str, tuple[str, dict[str, str]]] = {  # each with its environment
    "sfi": (OURS, {"policy": "sfi"}),
    "full-kv": (OURS, {"policy": "full-kv"}),
    "transformers": (OURS, {}),
    "transformers, kvpress' version": (THEIRS, {}),
    "kvpress KnormPress": (THEIRS, {"press": "KnormPress"}),
    "kvpress SnapKVPress": (THEIRS, {"press": "SnapKVPress"}),
}
SETTLED = 8  # steps after kvpress' first compression that are not measured
NOTES = (
    "kvpress' DecodingPress keeps the whole cache until its first compression, after compression_interval",
    "it evicts for good: what it drops cannot come back, and the cache grows until the next compression",
    "what is measured starts after the first compression",
    "sfi keeps the cache; a fast step reads sink + budget + recent tokens, one step in stride is slow",
    "transformers: greedy model.generate with its dynamic cache, in both environments",
    "weights are random: tokens differ between methods and mean nothing, only the time counts",
)


def kvpress_python(folder: Path) -> Path:
    """Return the interpreter of kvpress' environment; make the environment if there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {KVPRESS}", file=sys.stderr)
        venv.create(folder, with_pip=True)
    known = subprocess.run(  # noqa: S603 - the environment's own interpreter
        [python, "-c", "import kvpress"], capture_output=True, check=False
    )
    if known.returncode:
        same_torch = f"torch=={version('torch').partition('+')[0]}"
        subprocess.run(  # noqa: S603
            [python, "-m", "pip", "install", "--quiet", same_torch, KVPRESS], check=True
        )
    return python


def run_once(python: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Decode in a process of an environment; its messages go to stderr."""
    done = subprocess.run(  # noqa: S603 - our own script
        [python, WORKER], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def row(name: str, runs: list[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Return what a method's runs took."""
    at = [run["at"] for run in runs]
    rates = [(len(times) - 1 - warm_up) / (times[-1] - times[warm_up]) for times in at]
    return {
        "method": name,
        "environment": METHODS[name][0],
        "decode_tokens_per_second": statistics.median(rates),
        "repeat_rates": rates,
        "all_decode_tokens_per_second": statistics.median((len(times) - 1) / (times[-1] - times[0]) for times in at),
        "prefill_seconds": statistics.median(run["at"][0] - run["began"] for run in runs),
        "cached_tokens_at_the_end": runs[-1].get("cached_tokens"),
        "slow_steps": runs[-1].get("slow_steps"),
        "peak_memory_bytes": runs[-1]["peak_memory_bytes"],
    }


def measure(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save the model, and let the methods take turns."""
    pythons = {OURS: Path(sys.executable), THEIRS: kvpress_python(asked.environment)}
    torch.manual_seed(0)
    small = folder / "small.json"
    small.write_text(json.dumps(SMALL))
    model = random_model(random_config(str(small)), torch.device("cpu"), torch.float32, 0)
    model.save_pretrained(folder / "model")
    warm_up = asked.interval + SETTLED
    request = {
        "model": str(folder / "model"), "threads": asked.threads, "tokens": warm_up + asked.steps + 1,
        "prompt": torch.randint(1, SMALL["vocab_size"], (asked.prompt,)).tolist(), "config": CONFIG,
        "target": SfiConfig().sink + CONFIG["budget"] + CONFIG["recent"], "interval": asked.interval,
    }  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for repeat in range(asked.repeats):
        for name, (environment, options) in METHODS.items():
            runs[name].append(run_once(pythons[environment], request | options))
            shown = row(name, runs[name][-1:], warm_up)["decode_tokens_per_second"]
            print(f"repeat {repeat + 1}, {name}: {shown:.2f} tokens/s", file=sys.stderr)
    rows = [row(name, answers, warm_up) for name, answers in runs.items()]
    base = next(r for r in rows if r["method"] == "transformers")["decode_tokens_per_second"]
    for entry in rows:
        entry["speedup_over_transformers"] = entry["decode_tokens_per_second"] / base
    names = ("prompt", "interval", "steps", "repeats", "threads")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "rows": rows,
        "settings": {name: getattr(asked, name) for name in names} | CONFIG | {"warm_up": warm_up},
        "model": SMALL,
        "notes": list(NOTES),
        "machine": describe(),
        "versions": {METHODS[name][0]: answers[-1]["versions"] for name, answers in runs.items()},
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, default=Path(".venv-kvpress"))
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--interval", type=int, default=512, help="kvpress' compression_interval")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.output is not None and asked.output.exists():
        sys.exit(f"error: output {asked.output} exists; remove it or name another")
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(measure(asked, Path(folder)), indent=1) + "\n"
    if asked.output is not None:
        asked.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
