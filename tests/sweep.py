"""Every model type that transformers maps to a causal language model, as a tiny random model under sfi.

    python -m tests.sweep [--jobs N] [--write] [TYPE ...]

Each ends as one of: works; refused by name, with the reason; not a case, with transformers' own message. Any other
end is a bug. `--write` keeps the ends in `RESULTS`, by release of transformers, for `docs/architectures.md`.
"""

import argparse
import json
import logging
import os
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sfi_core import EngineOptions, SfiConfig, generate, slow_fast
from sfi_core.errors import UnsupportedModelError
from tests.architectures import RESULTS, padded, prompts
from tests.tiny_models import build

LENGTHS = (9, 24, 37)
STEPS = 9
LIMIT_S = 300  # of a processor, a model
# sparse at these models' lengths, and slow at every third step
SMALL = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=6, budget=5, t_max=64, window_prefill=8, trigger_delay=0,
    trigger_policy="stride", stride=3, trigger_token_ids=(),
)  # fmt: skip
WHOLE = SMALL.replace(budget=1000)
EVERY_STEP = SMALL.replace(budget=1, trigger_policy="always")
SLOW_AT = list(range(0, STEPS, 3))


def plain(model, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    batch = padded(rows)
    output = model.generate(**batch, max_new_tokens=STEPS, do_sample=False)
    return output[:, batch["input_ids"].shape[1] :].tolist()


def under_sfi(model, rows: Sequence[Sequence[int]], config: SfiConfig):
    """Return the tokens of `model.generate` inside `slow_fast`, and the report."""
    batch = padded(rows)
    with slow_fast(model, None, config) as session:
        output = model.generate(**batch, max_new_tokens=STEPS, do_sample=False)
    return output[:, batch["input_ids"].shape[1] :].tolist(), session.report


def own_loop(model, rows: Sequence[Sequence[int]], **options) -> list[list[int]]:
    result = generate(model, None, rows, SMALL, max_new_tokens=STEPS, stop_token_ids=(), **options)
    return [request.token_ids for request in result.report.requests]


def check(model) -> list[str]:
    """Run a model under sfi beside transformers; return notes of what it cannot, or raise `AssertionError`."""
    rows, notes = prompts(*LENGTHS), []
    try:
        whole, _ = under_sfi(model, rows, WHOLE)
    except UnsupportedModelError as error:
        if "of one length" not in str(error):
            raise
        notes.append(str(error))
        rows = prompts(37, 37, 37)
        whole, _ = under_sfi(model, rows, WHOLE)
    alone = [plain(model, [row]) for row in rows]
    expected = [tokens[0] for tokens in alone]
    if plain(model, rows) != expected:
        notes.append("transformers' own rows of a padded batch are not those of a prompt alone")
    _same("every step slow", under_sfi(model, rows, EVERY_STEP)[0], expected)
    _same("a budget of everything", whole, expected)
    sparse, report = under_sfi(model, rows, SMALL)
    assert report.requests[2].read_ratio < 0.75, "a small budget reads less"
    _same("slow steps", [request.slow_at for request in report.requests], [SLOW_AT] * len(rows))
    _same("our loop", own_loop(model, rows), sparse)
    for row, tokens in zip(rows, sparse, strict=True):
        _same("a row alone", own_loop(model, [row]), [tokens])
    if not notes or "of one length" not in notes[0]:
        _same("one after the other", own_loop(model, rows, max_batch=1), sparse)
        _same("joining", own_loop(model, [*rows, rows[0]], max_batch=2), [*sparse, sparse[0]])
    try:
        _same("in pieces", own_loop(model, rows, engine=EngineOptions(prefill_chunk=5)), sparse)
    except UnsupportedModelError as error:
        notes.append(str(error))
    return notes


def _same(what: str, ours, right) -> None:
    assert ours == right, f"{what}: {ours} for {right}"


def judge(model_type: str) -> tuple[str, str]:
    """Return how a type ends, and why."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        model = build(model_type)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return "not a case", f"transformers makes no such model: {type(error).__name__}: {error}"
    try:
        plain(model, prompts(9))
    except Exception as error:  # noqa: BLE001
        return "not a case", f"transformers itself fails: {type(error).__name__}: {error}"
    try:
        return "works", "; ".join(check(model))
    except UnsupportedModelError as error:
        return "refused", str(error)
    except AssertionError as error:
        return "wrong", str(error)


def in_processes(names: Sequence[str], jobs: int) -> Iterator[tuple[str, str, str]]:
    """Judge each type in a process of its own, `jobs` at a time; yield its name, end and reason."""
    running = {}
    waiting = list(reversed(names))
    while waiting or running:
        while waiting and len(running) < jobs:
            name, file = waiting.pop(), tempfile.TemporaryFile("w+")  # noqa: SIM115
            child = os.fork()
            if child == 0:
                resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
                resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
                json.dump(judge(name), file)  # what nobody expected ends the process with a traceback
                file.flush()
                os._exit(0)
            running[child] = name, file
        child, status = os.wait()
        name, file = running.pop(child)
        with file:
            file.seek(0)
            end, why = json.load(file) if status == 0 else ("crash", f"its process ended with {status}")
        yield name, end, " ".join(why.split())


def main() -> int:
    """Sweep, print and keep; return 1 if a model ended in another way than the three."""
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*", default=sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    ends = {}
    for name, end, why in in_processes(asked.types, asked.jobs):
        ends[name] = [end, why]
        print(f"{name}: {end}{why and ': '}{why}", flush=True)  # noqa: T201
    count = Counter(end for end, _ in ends.values())
    print(f"transformers {transformers.__version__}:", ", ".join(f"{n} {end}" for end, n in count.most_common()))  # noqa: T201
    if asked.write:
        known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        before = known.get(transformers.__version__, {})
        known[transformers.__version__] = dict(sorted({**before, **ends}.items()))
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return int(bool(count.keys() - {"works", "refused", "not a case"}))


if __name__ == "__main__":
    sys.exit(main())
