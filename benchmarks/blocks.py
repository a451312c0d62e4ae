"""Compare weights kept as blocks, and compiled steps over them, with a GGUF file's dequantized float32 model.

    python benchmarks/blocks.py TEXT MODEL.gguf ... --output benchmarks/results/NAME.json

For each file: KL(float32 || blocks) of a text's next tokens, decoded token by token; the same with all matrices rounded
to int8, and with the first file's matrices rounded to each type that gguf can write. Then greedy tokens by policy: how
many are the float32 model's own, decoded module by module. On a CPU.
"""

import argparse
import copy
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import torch

from sfi_core import EngineOptions, SfiConfig, generate, load
from sfi_core.engine.audit import divergence
from sfi_core.machine.memory import describe
from sfi_core.machine.versions import versions
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.models.blocks import Blocks
from sfi_core.models.linear import BlockLinear

POLICIES = ("full-kv", "sfi", "codescan", "quest", "snapkv", "streaming-llm", "freekv")
WRITABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # gguf does not write the others
EAGER = EngineOptions(graphs=False)


def logits_of(model: Any, tokenizer: Any, ids: list[int], prompt: int, engine: EngineOptions) -> list[torch.Tensor]:
    """Return the logits of each decoding step, [1, V]."""
    steps: list[torch.Tensor] = []

    def on_logits(step: int, logits_1V: torch.Tensor) -> None:
        if step:
            steps.append(logits_1V.clone())

    teacher_force(model, tokenizer, [ids], prompt, on_logits, policy="full-kv", engine=engine)
    return steps


def distance(plain: list[torch.Tensor], steps: list[torch.Tensor]) -> dict[str, float]:
    """Return the mean and largest KL, nats, and the share of steps with the same most likely token."""
    kl = torch.cat(
        [divergence(mine.log_softmax(-1), other.log_softmax(-1)) for mine, other in zip(plain, steps, strict=True)]
    )
    agrees = [int(mine.argmax()) == int(other.argmax()) for mine, other in zip(plain, steps, strict=True)]
    return {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "agreement": sum(agrees) / len(agrees)}


def in_blocks(model: Any, kind: str) -> tuple[Any, Any]:
    """Return a copy of a float32 model whose layers are blocks of a type, and its dequantized twin."""
    packed, plain = copy.deepcopy(model), copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module) is not torch.nn.Linear:
            continue
        weight, quantized = module.weight.detach().numpy(), gguf.GGMLQuantizationType[kind]
        rows = gguf.quantize(weight, quantized)
        packed.set_submodule(name, BlockLinear(Blocks.unpacked(rows, quantized), module.bias))
        twin = plain.get_submodule(name)
        twin.weight = torch.nn.Parameter(torch.from_numpy(gguf.dequantize(rows, quantized)), requires_grad=False)
    return packed, plain


def same_tokens(tokenizer: Any, plain: Any, blocks: Any, ids: list[int], tokens: int) -> dict[str, int]:
    """Return by policy how many greedy tokens the two models share from the first one on."""
    same = {}
    for policy in POLICIES:
        recent = 16 if policy == "codescan" else 128
        config = SfiConfig(budget=max(8, len(ids) // 10 - recent - 4), recent=recent)
        answers = [
            generate(
                model, tokenizer, [ids], config, policy=policy, max_new_tokens=tokens, stop_token_ids=(), engine=engine
            )
            for model, engine in ((plain, EAGER), (blocks, EngineOptions()))
        ]
        eager, compiled = (answer.report.requests[0].token_ids for answer in answers)
        assert answers[1].report.paths["step.compiled"], answers[1].report.not_compiled
        same[policy] = next(
            (at for at, pair in enumerate(zip(eager, compiled, strict=True)) if pair[0] != pair[1]), len(eager)
        )
        print(f"  {policy}: {same[policy]} of {tokens} tokens", file=sys.stderr)
    return same


def measure(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare each file."""
    rows: list[dict[str, Any]] = []
    for path in asked.models:
        blocks, tokenizer = load(path, device="cpu")
        plain, _ = load(path, device="cpu", weights="floats")
        ids = tokenizer(asked.text.read_text(encoding="utf-8"))["input_ids"][: asked.prompt + asked.steps + 1]
        expected = logits_of(plain, tokenizer, ids, asked.prompt, EAGER)
        compared = {"blocks": (blocks, expected)}
        compared["int8"] = load(path, device="cpu", weights="int8")[0], expected
        for kind in WRITABLE if path == asked.models[0] else ():
            model, twin = in_blocks(plain, kind)
            compared[kind] = model, logits_of(twin, tokenizer, ids, asked.prompt, EAGER)
        for name, (model, wanted) in compared.items():
            row = distance(wanted, logits_of(model, tokenizer, ids, asked.prompt, EngineOptions()))
            rows.append({"model": Path(path).name, "weights": name, **row})
            print(rows[-1], file=sys.stderr)
        rows[-len(compared)] |= {
            "types": blocks.sfi_weights.blocks,
            "same_tokens": same_tokens(tokenizer, plain, blocks, ids[: asked.prompt], asked.tokens),
        }
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("models", nargs="+", help="GGUF files")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=128, help="tokens whose distributions are compared")
    parser.add_argument("--tokens", type=int, default=200, help="greedy tokens a policy")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    settings = {"prompt": asked.prompt, "steps": asked.steps, "tokens": asked.tokens}
    document = {
        "date": datetime.now(UTC).date().isoformat(), "settings": settings, "rows": measure(asked),
        "machine": describe(), "versions": versions(),
    }  # fmt: skip
    text = json.dumps(document, indent=1) + "\n"
    if asked.output is not None:
        asked.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
