"""Say where a compiled decoding step on a CPU spends its time, beside the floor that its weights' bytes set.

    python benchmarks/step_parts.py TEXT MODEL.gguf ... --threads 1 2 --output benchmarks/results/NAME.json

For each file, in milliseconds a step: reading the weights' bytes once (`floor`), one row times every matrix
(`products`), and whole steps by policy after a prompt that is read once. All take turns, `--repeats` times; the median.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from sfi_core import PromptCache, SfiConfig, generate, load
from sfi_core.machine.memory import describe
from sfi_core.machine.versions import versions
from sfi_core.models.blocks import Blocks
from sfi_core.models.linear import BlockEmbedding, BlockLinear
from sfi_kernels.compiled import pool
from sfi_kernels.numba_ops import multiply_few

RECENT = {"sfi": 128, "codescan": 16}
SINK, SHARE, TOKENS = 4, 10, 24


def matrices(model: Any) -> list[tuple[Any, Blocks]]:
    """Return the matrices that multiply a decoding step's row: all but an embedding that is not the output's too."""
    linear = [(module.matrix, module.blocks) for module in model.modules() if isinstance(module, BlockLinear)]
    if not isinstance(model.lm_head, BlockLinear):
        tied = next(module for module in model.modules() if isinstance(module, BlockEmbedding))
        linear.append((tied.blocks.row, tied.blocks))
    return linear


def milliseconds(work: Callable[[], Any]) -> float:
    """Return how long a call takes."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def multiply_all(every: list[tuple[Any, Blocks]], inputs: dict[int, torch.Tensor]) -> None:
    """Multiply a row by each matrix."""
    for matrix, blocks in every:
        multiply_few(matrix, inputs[blocks.shape[1]])


def read_bytes(bytes_: int, threads: int) -> Callable[[], None]:
    """Return what reads so many bytes of memory with threads."""
    parts = np.array_split(np.ones(bytes_ // 4, np.float32), threads)
    return lambda: [future.result() for future in [pool().submit(np.max, part) for part in parts]] and None


def steps(model: Any, tokenizer: Any, ids: list[int], cache: PromptCache, policy: str) -> float:
    """Return the milliseconds of a decoding step after a prompt."""
    config = SfiConfig(trigger_policy="never")
    if policy in RECENT:
        recent = RECENT[policy]
        budget = len(ids) // SHARE - recent - SINK
        config = config.replace(budget=budget, recent=recent)
    result = generate(
        model, tokenizer, [ids], config, policy=policy, max_new_tokens=TOKENS, stop_token_ids=(), cache=cache
    )
    assert result.report.paths["step.compiled"], result.report.not_compiled
    return result.report.decode_seconds / (TOKENS - 1) * 1e3


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Time the parts of each file's steps."""
    rows: list[dict[str, Any]] = []
    for path in asked.models:
        model, tokenizer = load(path, device="cpu")
        ids = tokenizer(asked.text.read_text(encoding="utf-8"))["input_ids"][: asked.context]
        every = matrices(model)
        weights = sum(blocks.nbytes for _, blocks in every)
        inputs = {width: torch.randn(1, width) for width in {blocks.shape[1] for _, blocks in every}}
        cache, times = PromptCache(), {}
        steps(model, tokenizer, ids, cache, "full-kv")
        for threads in asked.threads:
            torch.set_num_threads(threads)
            read = read_bytes(weights, threads)
            for _ in range(asked.repeats):
                parts = {"floor": milliseconds(read), "products": milliseconds(partial(multiply_all, every, inputs))}
                parts |= {
                    policy: steps(model, tokenizer, ids, cache, policy) for policy in ("full-kv", "sfi", "codescan")
                }
                for name, taken in parts.items():
                    times.setdefault((threads, name), []).append(taken)
        rows.append({"model": Path(path).name, "weight_bytes": weights, "context": len(ids)})
        rows[-1]["milliseconds"] = [
            {"threads": threads, "part": name, "median": median(taken), "least": min(taken)}
            for (threads, name), taken in times.items()
        ]
        print(json.dumps(rows[-1], indent=1), file=sys.stderr)
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--context", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    document = {
        "date": datetime.now(UTC).date().isoformat(), "rows": measure(asked), "machine": describe(),
        "versions": versions(),
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    if asked.output is not None:
        asked.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
