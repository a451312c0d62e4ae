"""Every model type that transformers maps to a causal language model, as a tiny model, under sfi.

    python tests/sweep.py [--jobs N] [TYPE ...]

Each ends as one of: works; refused by name, with the reason; not a case, with transformers' own message. Anything
else is wrong.
"""

import json
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from sfi_core.errors import UnsupportedModelError
from sfi_core.generation.generate import generate
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.settings.config import SfiConfig
from sfi_core.settings.engine import EngineOptions
from tests.tiny_models import VOCABULARY, build

LENGTHS = (9, 24, 37)
STEPS = 12
LIMIT_S = 900  # of a processor
# sparse at these models' lengths, and slow at every third step
SMALL = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=6, budget=5, t_max=64, window_prefill=8, trigger_delay=0,
    trigger_policy="stride", stride=3, trigger_token_ids=(),
)  # fmt: skip
WHOLE = SMALL.replace(budget=1000)
EVERY_STEP = SMALL.replace(budget=1, trigger_policy="always")
SLOW_AT = list(range(0, STEPS, 3))


def prompts(*lengths: int) -> list[list[int]]:
    """Make random prompts, none of whose tokens is padding."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def padded(rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Pad prompts on the left, as `model.generate` takes them."""
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + list(row) for row in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
    }


def plain(model: Any, rows: Sequence[Sequence[int]]) -> tuple[list[list[int]], float]:
    """Return the new tokens of transformers' own `generate`, and the least lead of a token over the next best."""
    batch = padded(rows)
    output = model.generate(
        **batch, max_new_tokens=STEPS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(output.logits).float().topk(2).values
    lead = float((best[..., 0] - best[..., 1]).min())
    return output.sequences[:, batch["input_ids"].shape[1] :].tolist(), lead


def under_sfi(model: Any, rows: Sequence[Sequence[int]], config: SfiConfig) -> tuple[list[list[int]], Any]:
    """Return the tokens of `model.generate` inside `slow_fast`, and the report."""
    batch = padded(rows)
    with slow_fast(model, None, config) as session:
        output = model.generate(**batch, max_new_tokens=STEPS, do_sample=False)
    return output[:, batch["input_ids"].shape[1] :].tolist(), session.report


def own_loop(model: Any, rows: Sequence[Sequence[int]], **options: Any) -> list[Any]:
    """Return the requests of `sfi_core.generate` under a small budget."""
    return list(generate(model, None, rows, SMALL, max_new_tokens=STEPS, stop_token_ids=(), **options).report.requests)


def check(model: Any, out: Any) -> list[str]:
    """Return what is wrong with a model's runs under sfi; an empty list for nothing."""
    rows = prompts(*LENGTHS)
    try:
        under_sfi(model, rows, WHOLE)
    except UnsupportedModelError as error:
        if "of one length" not in str(error):
            raise
        out["limits"] = str(error)
        rows = prompts(37, 37, 37)
    alone = [plain(model, [row]) for row in rows]
    expected, lead = [tokens[0] for tokens, _ in alone], min(lead for _, lead in alone)
    wrong = []
    together = plain(model, rows)[0]
    if together != expected:
        wrong.append("note: transformers' own rows of a batch are not those alone")
    if lead < 1e-4:
        wrong.append(f"note: nearly tied, {lead:.1e}")

    def same(what: str, got: Any, right: Any) -> None:
        if got != right:
            wrong.append(f"{what}: {got} for {right}")

    same("every step slow", under_sfi(model, rows, EVERY_STEP)[0], expected)
    same("a budget of everything", under_sfi(model, rows, WHOLE)[0], expected)
    sparse, report = under_sfi(model, rows, SMALL)
    if not report.requests[2].read_ratio < 0.75:
        wrong.append(f"a small budget reads {report.requests[2].read_ratio}")
    same("slow steps", [request.slow_at for request in report.requests], [SLOW_AT] * len(rows))
    ours = own_loop(model, rows)
    same("our loop", [request.token_ids for request in ours], sparse)
    for row, request in zip(rows, ours, strict=True):
        same("a row alone", own_loop(model, [row])[0].token_ids, request.token_ids)
    if "limits" in out:
        return wrong
    same("joining", [request.token_ids for request in own_loop(model, rows, max_batch=1)], sparse)
    same(
        "joining 2",
        [request.token_ids for request in own_loop(model, [*rows, rows[0]], max_batch=2)],
        [*sparse, sparse[0]],
    )
    try:
        same("in pieces", [r.token_ids for r in own_loop(model, rows, engine=EngineOptions(prefill_chunk=5))], sparse)
    except UnsupportedModelError as error:
        wrong.append(f"note: {error}")
    return wrong


def judge(model_type: str) -> dict[str, Any]:
    """Return how a type ends."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    began = time.perf_counter()
    try:
        model = build(model_type)
    except Exception as error:
        return {"type": model_type, "end": "not built", "why": f"{type(error).__name__}: {error}"}
    name = type(model).__name__
    out = {"type": model_type, "class": name}
    try:
        plain(model, prompts(9))
    except Exception as error:
        out |= {"plain": f"{type(error).__name__}: {str(error)[:200]}"}
    try:
        wrong = check(model, out)
        hard = [one for one in wrong if not one.startswith("note")]
        out |= {"end": "WRONG" if hard else "works", "why": "; ".join(wrong)}
    except UnsupportedModelError as error:
        out |= {"end": "refused", "why": str(error)}
    except Exception as error:
        import traceback

        out |= {"end": "CRASH", "why": f"{type(error).__name__}: {str(error)[:300]}", "trace": traceback.format_exc()}
    out["seconds"] = round(time.perf_counter() - began, 1)
    return out


def in_processes(names: Sequence[str], jobs: int) -> Iterator[dict[str, Any]]:
    """Judge each type in a process of its own, `jobs` at a time; one that dies is told."""
    running: dict[int, tuple[str, Any]] = {}
    waiting = list(reversed(names))
    while waiting or running:
        while waiting and len(running) < jobs:
            name, file = waiting.pop(), tempfile.TemporaryFile("w+")
            child = os.fork()
            if child == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
                json.dump(judge(name), file)
                file.flush()
                os._exit(0)
            running[child] = name, file
        child, status = os.wait()
        name, file = running.pop(child)
        with file:
            file.seek(0)
            yield json.load(file) if status == 0 else {"type": name, "end": "CRASH", "why": f"ended with {status}"}


if __name__ == "__main__":
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = sys.argv[1:] or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    out = open(os.environ.get("SWEEP_OUT", "/tmp/h33-env/sweep.jsonl"), "a")
    for one in in_processes(names, 2):
        out.write(json.dumps(one) + "\n")
        out.flush()
        print(one["type"], one["end"], one.get("plain", ""), one.get("why", "")[:400], one.get("seconds"), flush=True)
