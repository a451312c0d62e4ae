"""Decode at a long context: sfi and full-kv beside transformers' own generate, in one process, interleaved.

    python benchmarks/decode.py --context 16384 --output benchmarks/results/NAME.json

The model has random weights (Qwen3-0.6B's architecture) and every cache is filled with random keys, so
nothing is prefilled and the tokens mean nothing. Under sfi one step in `--stride` is slow.
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from sfi_core import SfiConfig, slow_fast
from sfi_core.machine import describe
from sfi_core.memory import peak_bytes, reset_peak
from sfi_core.model import quiet
from sfi_core.synthetic import random_keys, synthetic_cache
from sfi_core.versions import versions
from sfi_traces.timing import TimingObserver

QWEN3_06B = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}


@torch.no_grad()
def run_sfi(model: Any, policy: str, context: int, steps: int, stride: int) -> dict[str, Any]:
    """Decode `steps` tokens with our cache."""
    times = TimingObserver(model.device)
    config = SfiConfig(trigger_policy="stride", stride=stride, slow_start=1, span=0)
    with slow_fast(model, None, config, policy=policy, observers=[times]) as session:
        reset_peak(model.device)
        expected = session.forecast(1, 1, context + steps + 1).total_bytes
        cache = synthetic_cache(session, context, context + steps + 1)
        step_seconds, token = [], 0
        for step in range(steps):
            began = time.perf_counter()
            position = torch.tensor([[context + step]])
            output = model(
                input_ids=torch.tensor([[token]]),
                position_ids=position,
                past_key_values=cache,
                use_cache=True,
            )
            token = int(output.logits[0, -1].argmax())
            session.run.record([token])
            step_seconds.append(time.perf_counter() - began)
        states = session.run.requests[0]
        slow = [step_seconds[t - 1] for t in states.slow_at if t > 0]
        fast = [s for t, s in enumerate(step_seconds, 1) if t not in states.slow_at]
    spans: dict[str, list[float]] = {}
    for _, _, _, name, _, _, elapsed_us, _ in times.rows:
        spans.setdefault(name, []).append(elapsed_us)
    means = {name: statistics.fmean(elapsed) for name, elapsed in spans.items()}
    return {
        "seconds": sum(step_seconds),
        "fast_step_seconds": statistics.median(fast) if fast else None,
        "slow_step_seconds": statistics.median(slow) if slow else None,
        "fast_attention_us": means.get("attention.fast"),
        "dense_attention_us": means.get("attention.dense"),
        "selector_us": means.get("selector"),
        "top_k_us": means.get("top_k"),
        "forecast_bytes": expected,
        "peak_bytes": peak_bytes(model.device),
        "slow_steps": len(slow),
    }


class StepClock:
    """A streamer that notes when each token arrives."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note a token, or the prompt."""
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to finish."""


@torch.no_grad()
def run_transformers(model: Any, context: int, steps: int) -> dict[str, Any]:
    """Decode with `model.generate` and its default cache."""
    cache = DynamicCache(config=model.config)
    generator = torch.Generator(model.device).manual_seed(0)
    config = model.config
    for layer in range(config.num_hidden_layers):
        cache.update(
            *random_keys(model, config.num_key_value_heads, config.head_dim, context, generator),
            layer,
        )
    clock = StepClock()
    ids = torch.zeros(1, context + 1, dtype=torch.long)
    model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, do_sample=False,
        max_new_tokens=steps + 1, streamer=clock,
    )  # fmt: skip
    # at[0] is the prompt and at[1] the first token, whose step also prepares the run
    return {"seconds": clock.at[-1] - clock.at[1]}


def measure(
    model: Any, context: int, steps: int, stride: int, repeats: int
) -> list[dict[str, Any]]:
    """Interleave the runs; report the median of each."""
    runners = {
        "transformers": lambda: run_transformers(model, context, steps),
        "full-kv": lambda: run_sfi(model, "full-kv", context, steps, stride),
        "sfi": lambda: run_sfi(model, "sfi", context, steps, stride),
    }
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, runner in runners.items():
            results[name].append(runner())
            print(
                f"{context:>6} {name:<13} {steps / results[name][-1]['seconds']:.2f} tokens/s",
                flush=True,
            )
    base = statistics.median(r["seconds"] for r in results["transformers"])
    rows = []
    for name, runs in results.items():
        seconds = [r["seconds"] for r in runs]
        middle = sorted(runs, key=lambda r: r["seconds"])[len(runs) // 2]
        rows.append(
            {
                "method": name,
                "context": context,
                "decode_tokens_per_second": steps / statistics.median(seconds),
                "tokens_per_second_range": [steps / max(seconds), steps / min(seconds)],
                "speedup_over_transformers": base / statistics.median(seconds),
                **{key: value for key, value in middle.items() if key != "seconds"},
            }
        )
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--context", type=lambda text: [int(word) for word in text.split(",")], default=[16384]
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--stride", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    quiet()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**QWEN3_06B)).to(torch.bfloat16).eval()
    rows = []
    for context in arguments.context:
        rows += measure(model, context, arguments.steps, arguments.stride, arguments.repeats)
    document = {
        "date": date.today().isoformat(),  # noqa: DTZ011 - the day is enough
        "model": "random weights, Qwen3-0.6B architecture, bfloat16",
        "steps": arguments.steps,
        "stride": arguments.stride,
        "repeats": arguments.repeats,
        "machine": describe(),
        "versions": versions(),
        "rows": rows,
    }
    text = json.dumps(document, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
