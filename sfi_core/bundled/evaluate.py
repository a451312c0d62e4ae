"""How well the bundled task is answered: `python -m sfi_core.bundled.evaluate --length 2048,4096`.

Prints a Markdown table of policies and presets at several budgets, on held-out documents.
"""

import argparse
import random
from collections.abc import Sequence
from typing import Any

from sfi_core.bundled.corpus import Recall
from sfi_core.bundled.train import HELD_OUT, draw
from sfi_core.config import SfiConfig
from sfi_core.generation import generate
from sfi_core.model import load

RECENT, ASKED, NEW_TOKENS = 128, 5, 75  # the recent window holds the request and the answer so far
START = {"slow_start": 2}
SPAN = {**START, "span": 10}
ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("`default`", "sfi", "default", {}),
    ("`paper`", "sfi", "paper", {}),
    ("`released`", "sfi", "released", {}),
    ("`default`, span 10", "sfi", "default", {"span": 10}),
    ("`default`, slow_start 2", "sfi", "default", START),
    ("`default`, slow_start 2, span 10", "sfi", "default", SPAN),
    ("the same, trigger_delay 0", "sfi", "default", {**SPAN, "trigger_delay": 0}),
    ("the same, alpha_soft 0", "sfi", "default", {**SPAN, "selector": {"alpha_soft": 0.0}}),
    ("streaming-llm", "streaming-llm", "default", {}),
    ("oracle-top-k", "oracle-top-k", "default", {}),
)


def score(
    model: Any, tokenizer: Any, examples: Sequence[Recall], policy: str, config: SfiConfig
) -> tuple[float, float, float]:
    """Decode greedily; return the share of exact answers, of right tokens, and of the cache read."""
    exact = right = total = 0
    read = 0.0
    for example in examples:
        answer = tokenizer(example.answer, add_special_tokens=False)["input_ids"]
        wanted = [*answer, tokenizer.eos_token_id]
        result = generate(
            model, tokenizer, [example.prompt], config, policy=policy, max_new_tokens=NEW_TOKENS
        )
        request = result.report.requests[0]
        exact += request.token_ids == wanted
        right += sum(a == b for a, b in zip(request.token_ids, wanted, strict=False))
        total += len(wanted)
        read += request.read_ratio
    return exact / len(examples), right / total, read / len(examples)


def main() -> None:
    """Evaluate and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder; default: the bundled checkpoint")
    parser.add_argument("--length", default="2048,4096", help="tokens of the documents")
    parser.add_argument(
        "--share", default="0.05,0.1,0.25", help="sink + budget + recent over length"
    )
    parser.add_argument("--samples", type=int, default=20)
    arguments = parser.parse_args()
    model, tokenizer = load(arguments.model)
    shares = [float(word) for word in arguments.share.split(",")]
    print(
        "| context | method | " + " | ".join(f"{share:.0%} of context" for share in shares) + " |"
    )
    print("|---|---|" + "---|" * len(shares))
    for length in (int(word) for word in arguments.length.split(",")):
        seeds = range(HELD_OUT, HELD_OUT + arguments.samples)
        examples = [draw(random.Random(seed), length, ASKED) for seed in seeds]
        exact, right, _ = score(model, tokenizer, examples, "full-kv", SfiConfig())
        cell = f"{exact:.0%} / {right:.0%} (reads 100%)"
        print(f"| {length} | full-kv | " + " | ".join([cell] * len(shares)) + " |", flush=True)
        for name, policy, preset, changes in ROWS:
            cells = []
            for share in shares:
                total = int(length * share)
                recent = min(RECENT, total // 2)
                sizes = {"budget": total - recent - SfiConfig().sink, "recent": recent}
                settings = SfiConfig.preset(preset).replace(**sizes, **changes)
                exact, right, read = score(model, tokenizer, examples, policy, settings)
                cells.append(f"{exact:.0%} / {right:.0%} (reads {read:.1%})")
            print(f"| {length} | {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
