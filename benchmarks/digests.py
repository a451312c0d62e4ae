"""Digests of what the engine computes, for changes that must not change it.

    python benchmarks/digests.py --write FILE      before the change
    python benchmarks/digests.py --compare FILE    after it: prints what differs, exits with 1

Each case digests token ids, slow steps and their reasons, every selection, the paths taken and the order in
which an observer is told. Floating point differs between machines: compare on the machine that wrote.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is first imported
ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "kernels", "traces")]

import torch  # noqa: E402

from benchmarks.compared import add_options, compared  # noqa: E402
from sfi_core import AuditConfig, EngineOptions, Sampling, SfiConfig, generate, load, slow_fast  # noqa: E402
from sfi_core.settings.policy_names import built_in  # noqa: E402
from tests.architectures import BY_LABEL, WORKS, padded, prompts  # noqa: E402

CONFIG = SfiConfig(
    sink=2, recent=8, budget=12, t_max=4, span=2, trigger_token_ids=tuple(range(0, 300, 5)), window_prefill=4
).replace(synckv={"heads": "even"}, freekv={"page": 4}, baseline={"page": 4})
PAPER = SfiConfig.preset("paper").replace(
    sink=2, recent=8, budget=12, t_max=4, trigger_token_ids=tuple(range(0, 300, 5))
)
RAGGED, STEPS = (70, 31, 50), 20
POLICIES = tuple(name for name in built_in() if name != "sfi")


def digest(value: Any) -> str:
    """Shorten a JSON value."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


class Listener:
    """Notes every selection, and the order of events and spans."""

    def __init__(self) -> None:
        self.selections: list[Any] = []
        self.told: list[Any] = []

    def on(self, event: Any) -> None:
        """Note an event."""
        name = type(event).__name__
        self.told.append([name, getattr(event, "step", None), getattr(event, "layer", None)])
        if name == "SelectionEvent":
            where = [event.request, event.step, event.layer]
            marks = {k: [round(x, 4) for x in v.flatten().tolist()] for k, v in event.diagnostics.items()}
            chosen = [[p for p in head if p >= 0] for head in event.index_HK.tolist()]
            self.selections.append([*where, chosen, marks])

    on_run = on_prompt = on_begin_step = on_step = on_selection = on_audit = on_logits = on

    @contextmanager
    def span(self, name: str, layer: int | None = None, moved_bytes: int = 0) -> Any:
        """Note a span."""
        self.told.append([name, layer, moved_bytes])
        yield


def summary(report: Any, seen: Listener) -> dict[str, str]:
    """Digest a run."""
    requests = report.requests
    return {
        "tokens": digest([r.token_ids for r in requests]),
        "slow": digest([[r.slow_at, r.reasons, r.finish_reason] for r in requests]),
        "ratios": digest([[r.mean_attended_tokens, r.read_ratio, r.selection_ratio, r.stored_ratio] for r in requests]),
        "selections": digest(seen.selections),
        "paths": digest(sorted(report.paths.items())),
        "kernels": digest([[k.name, k.launches] for k in report.kernels]),
        "told": digest(seen.told),
    }


def own_loop(model: Any, config: SfiConfig = CONFIG, rows: Any = None, **options: Any) -> Any:
    """Run `generate`."""
    seen = Listener()
    rows = rows or prompts(*RAGGED)
    options = {"max_new_tokens": STEPS, "stop_token_ids": (), **options}
    result = generate(model, options.pop("tokenizer", None), rows, config, observers=[seen], **options)
    return summary(result.report, seen)


def hosted(model: Any, config: SfiConfig = CONFIG, **options: Any) -> Any:
    """Run `model.generate` under `slow_fast`."""
    seen = Listener()
    torch.manual_seed(0)
    with slow_fast(model, None, config, observers=[seen]) as session:
        model.generate(**padded(prompts(*RAGGED)), max_new_tokens=STEPS, **options)
        return summary(session.report, seen)


def bundled(**options: Any) -> Any:
    """Run the bundled example."""
    prompt = json.loads((ROOT / "sfi_core/bundled/example.json").read_text())["prompt"]
    model, tokenizer = load()
    return own_loop(model, SfiConfig.preset(options.pop("preset", "default")), [prompt],
                    tokenizer=tokenizer, max_new_tokens=40, **options)  # fmt: skip


def ranks() -> Any:
    """Run a tiny model on two ranks."""
    prompt = "Where is it? The red house. Say more! and more; and more. " * 8
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "sfi_cli", "generate", prompt, "--json", "-n", "24", "--recent", "8",
        "--set", "sink=2", "--budget", "12", "--t-max", "4", "--dtype", "float32",
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "traces"))
    }
    done = subprocess.run(  # noqa: S603 - our own command line
        command, check=True, capture_output=True, text=True, env=environment, cwd=ROOT
    )
    requests = json.loads(done.stdout)["requests"]
    keys = ("token_ids", "slow_at", "reasons", "read_ratio")
    return {key: digest([request[key] for request in requests]) for key in keys}


def cases() -> dict[str, Callable[[], Any]]:
    """List the cases by name."""
    llama = BY_LABEL["llama"].build
    some: dict[str, Callable[[], Any]] = {
        "bundled": bundled,
        "bundled paper": lambda: bundled(preset="paper"),
        "bundled full-kv": lambda: bundled(policy="full-kv"),
    }
    for architecture in WORKS:
        some[f"{architecture.label} own loop"] = lambda architecture=architecture: own_loop(architecture.build())
        some[f"{architecture.label} hosted"] = lambda architecture=architecture: hosted(architecture.build())
    for name in POLICIES:
        some[f"policy {name}"] = lambda name=name: own_loop(llama(), policy=name)
    changes = {
        "paper": PAPER,
        "random": CONFIG.replace(trigger_policy="random", random_rate=0.3, t_max=50),
        "pages": CONFIG.replace(page_size=4),
        "stride": CONFIG.replace(trigger_policy="stride", stride=3),
        "delay 0": CONFIG.replace(trigger_delay=0),
        "dense layers": CONFIG.replace(dense_layers=(1,)),
        "never": CONFIG.replace(trigger_policy="never"),
        "always": CONFIG.replace(trigger_policy="always"),
    }
    for name, config in changes.items():
        some[f"config {name}"] = lambda config=config: own_loop(llama(), config)
    sampled = {"sampling": Sampling(temperature=1.5, top_k=50), "seed": 3}
    lossless = {"engine": EngineOptions(lossless=True)}
    tiers = {"engine": EngineOptions(kv_device_budget="90%", kv_page=4)}
    codes_too = {"engine": EngineOptions(kv_device_budget="400KB", kv_page=4)}
    runs: dict[str, dict[str, Any]] = {
        "sampled": sampled,
        "chunks": {"engine": EngineOptions(prefill_chunk=16)},
        "pages": {"page_size": 16},
        "audit": {"audit": AuditConfig(every=3, top=16)},
        "max batch 2": {"max_batch": 2, "rows": prompts(40, 31, 50, 22, 61), "max_new_tokens": [9, 20, 4, 12, 7]},
        "max batch 1": {"max_batch": 1, "rows": prompts(40, 31, 50)},
        "max batch sampled": {"max_batch": 2, "rows": prompts(40, 31, 50, 22), **sampled},
        "max batch audit": {"max_batch": 2, "rows": prompts(40, 31, 50, 22), "audit": AuditConfig(every=2, top=8)},
    }
    for name, options in runs.items():
        some[f"run {name}"] = lambda options=options: own_loop(llama(), **options)
    for name in ("sfi", "streaming-llm", "codescan"):
        some[f"lossless {name}"] = lambda name=name: own_loop(llama(), policy=name, **lossless)
    some["lossless sampled"] = lambda: own_loop(llama(), **lossless, **sampled)
    some["lossless max batch"] = lambda: own_loop(llama(), rows=prompts(40, 31, 50, 22), max_batch=2, **lossless)
    for name in ("sfi", "freekv"):
        some[f"two tiers {name}"] = lambda name=name: own_loop(llama(), policy=name, **tiers)
    some["two tiers codescan"] = lambda: own_loop(llama(), policy="codescan", **codes_too)
    some["hosted sampled"] = lambda: hosted(llama(), do_sample=True, temperature=1.5)
    triton = {"engine": EngineOptions(backend="triton"), "page_size": 16, "max_new_tokens": 10}
    for label in ("llama", "gemma-2", "qwen3"):
        some[f"triton {label}"] = lambda label=label: own_loop(BY_LABEL[label].build(), **triton)
    for name in ("paper", "dense layers", "pages"):
        some[f"triton {name}"] = lambda name=name: own_loop(llama(), changes[name], **triton)
    for name in ("quest", "snapkv", "codescan", "freekv", "synckv"):
        some[f"triton {name}"] = lambda name=name: own_loop(llama(), policy=name, **triton)
    some["triton audit"] = lambda: own_loop(llama(), **triton, audit=AuditConfig(every=3, top=8))
    some["triton max batch"] = lambda: own_loop(
        llama(), rows=prompts(40, 31, 50, 22), max_batch=2, **{**triton, "max_new_tokens": [9, 5, 4, 6]}
    )
    some["two ranks"] = ranks
    return some


def digests(only: str) -> Iterator[tuple[str, Any]]:
    """Yield the digests of each case, or its error."""
    for name, run in cases().items():
        if only in name:
            torch.manual_seed(0)
            try:
                yield name, run()
            except Exception as error:  # noqa: BLE001
                yield name, {"error": f"{type(error).__name__}: {error}"}


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    options = parser.parse_args()
    return compared(options, digests(options.only))


if __name__ == "__main__":
    sys.exit(main())
