"""Decode one saved model with sfi, transformers and kvpress, run by run in turn, each in its own environment.

    python benchmarks/peers.py --output benchmarks/results/NAME.json

kvpress needs transformers before 5.3 and sfi a newer one, so this script makes a virtual environment for
kvpress (`--environment`, kept for the next time), with the PyTorch version of ours. The model has random
weights and is saved once; prompts are random tokens that every run really reads. On a CPU.
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
from typing import Any, Self

import torch

from sfi_core.machine.describe import describe
from sfi_core.measure.bench.architectures import random_config, random_model
from sfi_core.models.load import DTYPES
from sfi_core.settings.config import SfiConfig

WORKER = Path(__file__).with_name("peer_worker.py")
SMALL = {  # about 50 million weights
    "model_type": "qwen3", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
OURS, THEIRS = "sfi's", "kvpress'"
SETTLED = 8  # steps after kvpress' first compression that are not measured
NOTES = (
    "kvpress' DecodingPress keeps the whole cache until its first compression, after compression_interval",
    "it evicts for good: what it drops cannot come back, and the cache grows until the next compression",
    "what is measured starts after the first compression",
    "sfi keeps the cache; a fast step reads sink + budget + recent tokens, one step in stride is slow",
    "transformers: greedy model.generate with its dynamic cache, in both environments",
    "weights are random: tokens differ between methods and mean nothing, only the time counts",
)


class Worker:
    """A process that decodes in one environment."""

    def __init__(self, python: Path, model: Path, dtype: str, threads: int) -> None:
        command = [str(python), str(WORKER), str(model), dtype, str(threads)]
        self._process = subprocess.Popen(  # noqa: S603 - our own script
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self._read()["versions"]

    def __enter__(self) -> Self:
        """Start."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the process's stdin, which ends it."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        self._process.wait()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request to its end."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"error: a worker ended with {self._process.wait()}; its message is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def kvpress_python(folder: Path, spec: str) -> Path:
    """Return the interpreter of kvpress' environment; make the environment if there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making {folder} with {spec}", file=sys.stderr)
        venv.create(folder, with_pip=True)
    known = subprocess.run(  # noqa: S603 - the environment's own interpreter
        [python, "-c", "import kvpress"], capture_output=True, check=False
    )
    if known.returncode:
        same_torch = f"torch=={version('torch').partition('+')[0]}"
        subprocess.run(  # noqa: S603
            [python, "-m", "pip", "install", "--quiet", same_torch, spec], check=True
        )
    return python


def methods(arguments: argparse.Namespace) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return each method's environment and what it is asked for."""
    config = {
        "budget": arguments.budget, "recent": arguments.recent,
        "trigger_policy": "stride", "stride": arguments.stride,
    }  # fmt: skip
    target = SfiConfig().sink + arguments.budget + arguments.recent
    plain = {"policy": "", "press": "", "target": target, "interval": arguments.interval}
    asked = {
        "sfi": (OURS, {**plain, "policy": "sfi", "config": config}),
        "full-kv": (OURS, {**plain, "policy": "full-kv", "config": config}),
        "transformers": (OURS, plain),
        "transformers, kvpress' version": (THEIRS, plain),
    }
    for press in arguments.press:
        asked[f"kvpress {press}"] = (THEIRS, {**plain, "press": press})
    return asked


def row(
    name: str, environment: str, runs: list[dict[str, Any]], warm_up: int, batch: int
) -> dict[str, Any]:
    """Return what a method's runs took."""
    rates = [
        batch * (len(run["at"]) - 1 - warm_up) / (run["at"][-1] - run["at"][warm_up])
        for run in runs
    ]
    alls = [batch * (len(run["at"]) - 1) / (run["at"][-1] - run["at"][0]) for run in runs]
    prefills = [run["at"][0] - run["began"] for run in runs]
    last = runs[-1]
    return {
        "method": name,
        "environment": environment,
        "decode_tokens_per_second": statistics.median(rates),
        "repeat_rates": rates,
        "all_decode_tokens_per_second": statistics.median(alls),
        "prefill_seconds": statistics.median(prefills),
        "cached_tokens_at_the_end": last.get("cached_tokens"),
        "slow_steps": last.get("slow_steps"),
        "peak_memory_bytes": last["peak_memory_bytes"],
    }


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Save the model, start a worker in each environment, and let the methods take turns."""
    python = kvpress_python(arguments.environment, arguments.kvpress)
    torch.manual_seed(arguments.seed)
    small = folder / "small.json"
    small.write_text(json.dumps(SMALL))
    config = random_config(arguments.architecture or str(small))
    model = random_model(config, torch.device("cpu"), DTYPES[arguments.dtype], arguments.seed)
    model.save_pretrained(folder / "model")
    shape = (arguments.batch, arguments.prompt)
    prompts = torch.randint(1, config.vocab_size, shape).tolist()
    warm_up = arguments.interval + SETTLED
    asked = methods(arguments)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in asked}
    options = (folder / "model", arguments.dtype, arguments.threads)
    del model
    with Worker(Path(sys.executable), *options) as ours, Worker(python, *options) as theirs:
        workers = {OURS: ours, THEIRS: theirs}
        for repeat in range(arguments.repeats):
            for name, (environment, request) in asked.items():
                more = {"prompts": prompts, "tokens": warm_up + arguments.steps + 1}
                runs[name].append(workers[environment].ask({**request, **more}))
                rate = row(name, environment, runs[name][-1:], warm_up, arguments.batch)
                shown = rate["decode_tokens_per_second"]
                print(f"repeat {repeat + 1}, {name}: {shown:.2f} tokens/s", file=sys.stderr)
        versions = {OURS: ours.versions, THEIRS: theirs.versions}
    rows = [row(n, asked[n][0], runs[n], warm_up, arguments.batch) for n in asked]
    base = next(r for r in rows if r["method"] == "transformers")["decode_tokens_per_second"]
    for one in rows:
        one["speedup_over_transformers"] = one["decode_tokens_per_second"] / base
    named = vars(arguments) | {"environment": None, "output": None, "warm_up": warm_up}
    model_config = config.to_dict()
    model_config.pop("_name_or_path", None)  # a place on this machine
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "rows": rows,
        "settings": {name: value for name, value in named.items() if value is not None},
        "model": model_config,
        "notes": list(NOTES),
        "machine": describe(),
        "versions": versions,
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, default=Path(".venv-kvpress"))
    parser.add_argument("--kvpress", default="kvpress==0.5.*", help="pip requirement")
    parser.add_argument("--architecture", help="a config.json or a name as in sfi bench")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="float32")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--recent", type=int, default=128)
    parser.add_argument("--stride", type=int, default=20, help="steps between slow ones under sfi")
    parser.add_argument("--press", nargs="*", default=["KnormPress", "SnapKVPress"])
    parser.add_argument("--interval", type=int, default=512, help="kvpress' compression_interval")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.output is not None and arguments.output.exists():
        sys.exit(f"error: output {arguments.output} exists; remove it or name another")
    with tempfile.TemporaryDirectory() as folder:
        document = measure(arguments, Path(folder))
    text = json.dumps(document, indent=1) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
