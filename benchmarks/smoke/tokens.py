"""Stage 4: the tokens of a tiny model, without and with second stream and graphs."""

from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import sfi_core
from benchmarks.smoke.journal import Journal
from benchmarks.smoke.plan import Plan
from benchmarks.smoke.stand_in import kept_graphs
from sfi_core import SfiConfig
from sfi_core.settings.engine import EngineOptions

LENGTHS = (300, 90, 7)
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=16, budget=32, t_max=5, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 5)),
)  # fmt: skip
WAYS = {
    "plain": EngineOptions(overlap=False, graphs=False),
    "overlap": EngineOptions(overlap=True, graphs=False),
    "graphs": EngineOptions(overlap=False, graphs=True),
    "both": EngineOptions(overlap=True, graphs=True),
    "chained": EngineOptions(overlap=True, graphs=True, chained=True),
    "products": EngineOptions(overlap=True, graphs=True, products=True),
    "chained products": EngineOptions(overlap=True, graphs=True, chained=True, products=True),
}


def compare(journal: Journal, plan: Plan) -> None:
    """Generate in each way; the tokens must be those of the plain one."""
    torch.manual_seed(0)
    # peaked enough to make selection matter
    config = AutoConfig.for_model(**plan.small, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config).eval().to(plan.device)
    tokens: dict[str, Any] = {}
    for name, engine in WAYS.items():
        if engine.graphs and not plan.graphs:
            journal.note(name, skipped="--no-graphs")
            continue
        if engine.chained and plan.device.type == "cpu":
            journal.note(name, skipped="the interpreter chains no launches")
            continue
        journal.trial(name, lambda n=name, e=engine: _generated(model, plan, e, n, tokens))


def _generated(model: Any, plan: Plan, engine: EngineOptions, name: str, tokens: dict[str, Any]) -> dict[str, Any]:
    prompts = [[(7 * place + row) % 96 for place in range(n)] for row, n in enumerate(LENGTHS)]
    options = {"max_new_tokens": plan.tokens, "stop_token_ids": ()}
    engine = replace(engine, backend="triton")
    with kept_graphs(plan) as graphs:
        report = sfi_core.generate(model, None, prompts, CONFIG, engine=engine, **options).report
    tokens[name] = [request.token_ids for request in report.requests]
    same = tokens[name] == tokens.get("plain")
    replayed = report.paths.get("graph.replay", 0) > 0
    return {
        "same_tokens": same,
        "right": same and replayed == bool(engine.graphs),
        "paths": dict(report.paths),
        "capture_seconds": [round(seconds, 3) for seconds in graphs.seconds],
        "decode_tokens_per_second": report.decode_tokens_per_second,
    }
