"""The parts of gpu.sh that run sfi's own commands: several in one process, which imports torch once.

    python benchmarks/gpu_parts.py decode --folder results            a JSON file a command
    python benchmarks/gpu_parts.py decode --folder results --dry-run  the same on a CPU, tiny

A command that fails is said, and the next one runs. The exit code is the worst.
"""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

INTERRUPTED = 130
Command = tuple[str, list[str]]  # a name, and the words behind `sfi`
TINY_LAYER = [
    "--device", "cpu", "--backend", "torch", "--context", "700", "--batch", "2", "--heads", "4",
    "--kv-heads", "2", "--head-dim", "16",
]  # fmt: skip
TINY_RUN = [
    "--device", "cpu", "--context", "512", "--batch", "1,2", "--steps", "4",
    "--set", "bench.warm_up=2", "--time-limit", "1", "--budget", "64", "--set", "recent=32",
]  # fmt: skip
MEASURED = ["--steps", "40", "--set", "bench.warm_up=8", "--time-limit", "4"]
GENERATE = ["generate", "--no-compare", "--dtype", "float32", "--quiet", "--json", "--force"]


class Parts:
    """The commands of each part.

    Attributes:
        folder: Where their files go.
        dry: Whether a CPU stands in for the GPU.
        graphs: Whether decoding must run as CUDA graphs, or must not.
    """

    def __init__(self, folder: Path, *, dry: bool, graphs: bool) -> None:
        self.folder, self.dry, self.graphs = folder, dry, graphs

    def ops(self) -> list[Command]:
        """Every op, Table 1's sweep, then every op at two more shapes."""
        selected = "0.01761"  # of 131,072: 4 + 2048 + 256 tokens
        return [
            self._kernels("ops"),
            self._kernels("sweep", "--sweep", "retention"),
            self._kernels("ops-batch-1", "--batch", "1"),
            self._kernels("ops-128k-batch-4", "--context", "131072", "--batch", "4", "--retention", selected),
        ]

    def decode(self) -> list[Command]:
        """Decode Qwen3's architectures with graphs, the points that say most first."""
        points = [
            ("4b", "8k", "8K", "1,16"), ("4b", "32k", "32K", "1,8"), ("4b", "128k", "128K", "2"),
            ("0.6b", "short", "8K,32K", "1,16"),
        ]  # fmt: skip
        ours = "--policy", "sfi,codescan,full-kv"
        return [
            self._bench(f"decode-{size}-{name}", f"qwen3-{size}", *ours, context=context, batch=batch)
            for size, name, context, batch in points
        ]

    def decode_chained(self) -> list[Command]:
        """Decode two points with chained launches and own products, after the same without, whose rows to compare."""
        ours, on = ("--policy", "sfi,codescan,full-kv"), str(not self.dry).lower()
        chained, products = ("--set", f"engine.chained={on}"), ("--set", f"engine.products={on}")
        ways = {"plain": (), "chained": chained, "products": products, "both": (*chained, *products)}
        return [
            self._bench(f"decode-4b-{name}-{way}", "qwen3-4b", *ours, *options, context=context, batch=batch)
            for name, context, batch in (("8k", "8K", "1"), ("32k", "32K", "8"))
            for way, options in ways.items()
        ]

    def decode_eager(self) -> list[Command]:
        """Decode without graphs and without the second stream: a number whatever happens to them."""
        self.graphs = False
        plain = "--set", "engine.overlap=false"
        return [self._bench("decode-4b-eager", "qwen3-4b", *plain, context="8K", batch="1,16")]

    def decode_baseline(self) -> list[Command]:
        """Decode one point beside transformers, in the one part that has a baseline."""
        theirs = "--baseline", "transformers-dynamic"
        return [self._bench("decode-4b-baseline", "qwen3-4b", *theirs, context="8K", batch="1")]

    def decode_more(self) -> list[Command]:
        """Decode a ragged batch, and from two tiers."""
        commands = [self._bench("decode-4b-ragged", "qwen3-4b", "--ragged", context="32K", batch="8")]
        tiers = "--kv-device-budget", "80%" if self.dry else "30%"
        policies = "--policy", "sfi,codescan,snapkv,freekv,quest,synckv", "--set", "synckv.heads=even"
        commands.append(self._bench("decode-4b-tiers", "qwen3-4b", *tiers, *policies, context="32K", batch="1"))
        return commands

    def lossless(self) -> list[Command]:
        """Verify alone by queries, then decode losslessly at a stated acceptance, by the length of drafts."""
        ways: dict[str, tuple[str, str, tuple[str, ...]]] = {"": ("1,8", "0.95", ())}
        for draft in ("15", "8", "4", "16"):
            fixed = "--policy", "sfi", "--set", f"draft.max_tokens={draft}", "--set", "draft.adaptive=false"
            ways[f"-{draft}"] = "8", "0.98", fixed
        return [
            self._kernels("verify-32k", "--op", "verify", "--context", "32768", "--batch", "8"),
            *(
                self._bench(f"lossless-4b{name}", "qwen3-4b", *more, "--acceptance", rate, context="32K", batch=batch)
                for name, (batch, rate, more) in ways.items()
            ),
            self._bench("lossless-4b-128k", "qwen3-4b", "--acceptance", "0.98", context="128K", batch="2"),
        ]

    def overlap(self) -> list[Command]:
        """The second stream under the first one's layers, for ui.perfetto.dev."""
        trace = str(self.folder / "overlap-trace")
        tokens = ["--device", "cpu", "--max-new-tokens", "6"] if self.dry else []
        record = ["trace", "record", "-o", trace, "--force", "--quiet", *tokens]
        file = str(self.folder / "overlap.json")
        export = ["trace", "export", trace, "--format", "perfetto", "--force", "-o", file]
        return [("overlap-record", record), ("overlap", export)]

    def generate(self) -> list[Command]:
        """The bundled example under both backends, whose tokens `same_tokens` compares."""
        options = [*GENERATE, *(["--device", "cpu", "--max-new-tokens", "6"] if self.dry else [])]
        backends = ("torch", "torch") if self.dry else ("torch", "triton")
        return [
            (name, [*options, "--set", f"engine.backend={backend}", "-o", self._file(name)])
            for name, backend in zip(("generate-torch", "generate-triton"), backends, strict=True)
        ]

    def same_tokens(self) -> bool:
        """Print what both backends gave and whether it is the same."""
        names = ("generate-torch", "generate-triton")
        runs = [json.loads((self.folder / f"{name}.json").read_text()) for name in names]
        for name, run in zip(names, runs, strict=True):
            print(f"{name}: {run['decode_tokens_per_second']:,.1f} tokens/s, paths {run['paths']}")
        tokens = [[request["token_ids"] for request in run["requests"]] for run in runs]
        kernels = self.dry or any(name.startswith("triton") for name in runs[1]["paths"])
        print("same tokens" if tokens[0] == tokens[1] else f"tokens differ: {tokens}")
        return tokens[0] == tokens[1] and kernels

    def _file(self, name: str) -> str:
        return str(self.folder / f"{name}.json")

    def _kernels(self, name: str, *options: str) -> Command:
        shape = list(options) if not self.dry else [*TINY_LAYER, "--repeats", "2"]
        if self.dry:
            shape += ["--sweep", "retention"] if "--sweep" in options else ["--retention", "0.5"]
        words = ["kernel-bench", *([] if self.dry else ["--backend", "triton"]), *shape]
        return name, [*words, "--force", "--quiet", "--output", self._file(name)]

    def _bench(self, name: str, model: str, *options: str, context: str, batch: str) -> Command:
        graphs = "true" if self.graphs and not self.dry else "false"
        words = ["bench", "--set", f"engine.graphs={graphs}", "--repeats", "1", *options]
        if "--baseline" not in options:
            words += ["--baseline", "none"]
        if self.dry:
            words += TINY_RUN
        else:
            words += ["--random-weights", model, "--context", context, "--batch", batch, *MEASURED]
        return name, [*words, "--force", "--quiet", "--output", self._file(name)]


def run(commands: list[Command]) -> int:
    """Run commands one after the other; return the worst exit code, or 130 at once after Ctrl-C."""
    torch = importlib.import_module("torch")
    release = importlib.import_module("sfi_core.measure.bench.bench").release
    sfi: Callable[[], None] = importlib.import_module("sfi_cli.app").main
    worst = 0
    for name, words in commands:
        print(f"\n-- {name}: sfi {' '.join(words)}", flush=True)
        code = _code(sfi, words)
        print(f"-- {name}: exit code {code}", flush=True)
        worst = max(worst, code)
        if code == INTERRUPTED:
            return code
        try:
            release(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            print(f"-- the device is lost: {error}", flush=True)
            return worst or 1
    return worst


def _code(sfi: Callable[[], None], words: list[str]) -> int:
    sys.argv = ["sfi", *words]
    try:
        sfi()
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except Exception:  # noqa: BLE001 - a bug of one command must not end the others
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    """Run a part."""
    names = [name for name in vars(Parts) if not name.startswith("_") and name != "same_tokens"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("part", choices=[name.replace("_", "-") for name in names])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    parts = Parts(asked.folder, dry=asked.dry_run, graphs=not asked.no_graphs)
    code = run(getattr(parts, asked.part.replace("-", "_"))())
    if asked.part == "generate" and code == 0:
        return 0 if parts.same_tokens() else 1
    return code


if __name__ == "__main__":
    sys.exit(main())
