"""What a verification costs on a CPU: dense attention of several queries, beside a dense step of one query.

    python benchmarks/verify.py --output benchmarks/results/NAME.json

A model with random packed weights decodes after a made-up prompt, one request. The passes take turns in one
process, and each starts from the same cached tokens. CPU seconds: other work on the machine does not count,
though other work slows the memory down for all. Random weights accept next to nothing, so that no rate can be
measured: the rates printed are arithmetic on the measured parts, at a stated acceptance.
"""

import argparse
import copy
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from sfi_core import SfiConfig
from sfi_core.engine.forward import RequestPass
from sfi_core.generation.synthetic import SyntheticPrompt
from sfi_core.hosts.transformers.decoder import Decoder
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.machine.describe import describe
from sfi_core.machine.memory import peak_bytes
from sfi_core.machine.versions import versions
from sfi_core.measure.bench.architectures import random_config, random_model
from sfi_core.models.linear import pack_weights
from sfi_core.models.load import DTYPES
from sfi_core.settings.engine import EngineOptions

DENSE, FAST, SLOW, UNSELECTED = (
    "full-kv step",
    "fast step",
    "slow step",
    "slow step, nothing selected",
)
NOTES = (
    "full-kv step: dense attention of one query, whose logits are not handed out",
    "a slow step and a verification hand out one query's logits, and select with them unless said otherwise",
    "rates are arithmetic on the parts at a stated acceptance: random weights accept next to nothing",
    "sfi: one slow step after every draft's length of fast steps",
    "lossless: a draft, its verification, and after a rejection a slow step of the corrected token",
)
Seconds = dict[str, list[float]]  # by the pass's name


@dataclass(frozen=True)
class Pass:
    """A pass that is measured.

    Attributes:
        name: What it is called.
        queries: Tokens that the request brings.
        slow: Whether it attends densely.
        selects: Whether the memory is selected anew after it.
    """

    name: str
    queries: int = 1
    slow: bool = True
    selects: bool = True


def passes(queries: Sequence[int]) -> list[Pass]:
    """List what is measured under `sfi`."""
    found = [Pass(FAST, slow=False), Pass(SLOW), Pass(UNSELECTED, selects=False)]
    for count in queries:
        found.append(Pass(verification(count), count))
        found.append(Pass(f"{verification(count)}, nothing selected", count, selects=False))
    return found


def verification(queries: int) -> str:
    """Name a verification."""
    return f"verification of {queries} queries"


@contextmanager
def decoder_of(
    model: Any, prompt: SyntheticPrompt, policy: str, config: SfiConfig
) -> Iterator[Decoder]:
    """Yield a decoder whose prompt is read."""
    engine = EngineOptions(lossless=policy != "full-kv")
    with slow_fast(model, None, config, policy=policy, backend="torch", engine=engine) as session:
        ids_BT = torch.ones(1, prompt.contexts[0], dtype=torch.long)
        decoder = Decoder(
            session=session, ids_BT=ids_BT, mask_BT=torch.ones_like(ids_BT),
            capacity=prompt.capacity, shared=prompt.shared(session),
        )  # fmt: skip
        decoder.prefill()
        decoder.record([1])
        yield decoder


def seconds_of(decoder: Decoder, one: Pass) -> float:
    """Run a pass and pick its tokens; leave the request as it was; return the CPU seconds."""
    run = decoder.session.run
    state, before = run.requests[0], copy.copy(run.requests[0])
    ids_1W = torch.ones(1, one.queries, dtype=torch.long)
    positions_1W = state.length + torch.arange(one.queries)[None]
    select = run.policy.select_after
    if not one.selects:
        run.policy.select_after = lambda _: None  # type: ignore[method-assign]
    began = time.process_time()
    run.begin([RequestPass.decode(slow=one.slow, reason="limit", count=one.queries)])
    decoder.cache.see(before.length)
    decoder.planned_pass(ids_1W, positions_1W).argmax(-1).tolist()
    taken = time.process_time() - began
    run.policy.select_after = select  # type: ignore[method-assign]
    run.recorded = True
    for field in dataclasses.fields(state):
        setattr(state, field.name, getattr(before, field.name))
    return taken


@torch.inference_mode()
def measure(
    model: Any, context: int, config: SfiConfig, asked: Sequence[Pass], turns: int, repeats: int
) -> Seconds:
    """Measure every pass at a context: a turn takes each of them `repeats` times, after one more."""
    prompt = SyntheticPrompt([context], context + 1 + max(one.queries for one in asked))
    found: Seconds = {}
    for turn in range(turns):
        for policy, own in (("full-kv", [Pass(DENSE)]), ("sfi", asked)):
            with decoder_of(model, prompt, policy, config) as decoder:
                for repeat in range(repeats + 1):
                    for one in own:
                        taken = seconds_of(decoder, one)
                        found.setdefault(one.name, []).extend([taken] if repeat else [])
        shown = {name: round(statistics.median(all_), 3) for name, all_ in found.items()}
        print(f"context {context}, turn {turn + 1}: {shown}", file=sys.stderr)
    return found


def rates(parts: dict[str, float], queries: int, acceptance: float) -> dict[str, float]:
    """Return tokens per second, by arithmetic on the parts' seconds.

    Args:
        parts: Median seconds of each pass.
        queries: Queries of a verification: a draft has one token less.
        acceptance: Chance that a drafted token is full attention's, given that those before it were.
    """
    draft = queries - 1
    kept = sum(acceptance**place for place in range(1, draft + 1))
    rejected = 1 - acceptance**draft
    drafting = draft * parts[FAST]
    lossless = drafting + parts[verification(queries)] + rejected * parts[SLOW]
    return {
        "full_kv": 1 / parts[DENSE],
        "sfi": (draft + 1) / (drafting + parts[SLOW]),
        "lossless": (kept + 1 + rejected) / lossless,
    }


def rows(
    context: int, found: Seconds, queries: Sequence[int], acceptances: Sequence[float]
) -> list[dict[str, Any]]:
    """Return the measured parts of a context, each beside the dense steps, then the rates."""
    parts = {name: statistics.median(taken) for name, taken in found.items()}
    made: list[dict[str, Any]] = [
        {
            "context": context, "pass": name, "cpu_seconds": median, "samples": found[name],
            "over_full_kv_step": median / parts[DENSE],
            "over_slow_step": median / parts[SLOW],
            "over_slow_step_unselected": median / parts[UNSELECTED],
        }
        for name, median in parts.items()
    ]  # fmt: skip
    made += [
        {
            "context": context, "queries": count, "stated_acceptance": acceptance,
            "tokens_per_cpu_second": rates(parts, count, acceptance),
        }
        for count in queries
        for acceptance in acceptances
    ]  # fmt: skip
    return made


def line(row: dict[str, Any]) -> str:
    """Return a row for a reader."""
    if "pass" in row:
        ratios = [row[f"over_{name}"] for name in ("full_kv_step", "slow_step_unselected")]
        shown = f"{ratios[0]:5.2f} full-kv steps, {ratios[1]:5.2f} slow steps without selection"
        return f"{row['context']:>6} {row['pass']:<44} {row['cpu_seconds']:6.3f} s, {shown}"
    own = row["tokens_per_cpu_second"]
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in own.items())
    stated = f"{row['queries'] - 1} drafted, stated acceptance {row['stated_acceptance']}"
    return f"{row['context']:>6} {stated:<44} {shown} tokens/s by arithmetic"


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architecture", default="qwen3-0.6b", help="as `sfi bench --random`")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--context", type=int, nargs="+", default=[16384, 32768])
    parser.add_argument("--queries", type=int, nargs="+", default=[5, 9, 17])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 0.95, 0.9])
    parser.add_argument("--budget", type=int, default=SfiConfig().budget)
    parser.add_argument("--recent", type=int, default=SfiConfig().recent)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="of each pass in a turn")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json-lines", action="store_true", help="a JSON object a row on stdout")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(words)
    if min(asked.queries) < 2:  # noqa: PLR2004
        parser.error(f"queries must be at least 2, got {min(asked.queries)}")
    if asked.output is not None and asked.output.exists():
        parser.error(f"output {asked.output} exists; remove the file or name another")
    return asked


def main(words: Sequence[str] | None = None) -> None:
    """Measure and write."""
    asked = parsed(words)
    torch.set_num_threads(asked.threads)
    model = random_model(
        random_config(asked.architecture), torch.device("cpu"), DTYPES[asked.dtype]
    )
    if asked.dtype != "float32":
        pack_weights(model)
    config = SfiConfig(budget=asked.budget, recent=asked.recent, span=0, trigger_policy="stride")
    made = []
    for context in asked.context:
        found = measure(model, context, config, passes(asked.queries), asked.turns, asked.repeats)
        own = rows(context, found, asked.queries, asked.acceptance)
        made += own
        for row in own:
            print(json.dumps(row) if asked.json_lines else line(row), flush=True)
    document = {
        "date": datetime.now(UTC).date().isoformat(), "rows": made, "notes": NOTES,
        "settings": {n: v for n, v in vars(asked).items() if n not in ("output", "json_lines")},
        "load_average": os.getloadavg(), "peak_memory_bytes": peak_bytes(torch.device("cpu")),
        "machine": describe(), "versions": versions(),
    }  # fmt: skip
    if asked.output is not None:
        asked.output.write_text(json.dumps(document, indent=1) + "\n")
    elif not asked.json_lines:
        print(json.dumps(document["machine"]))


if __name__ == "__main__":
    main()
