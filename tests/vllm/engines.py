"""Makes vLLM engines over the bundled checkpoint, plain or with sfi, and looks into them."""

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown, get_kv_transfer_group

import sfi_core
from sfi_core import SfiConfig
from sfi_core.hosts.serving.worker import WorkerEngine
from sfi_core.hosts.vllm.planner import Planner
from sfi_core.models.load import BUNDLED

EXAMPLE = json.loads((BUNDLED.parent / "example.json").read_text())
GREEDY = {"temperature": 0.0, "ignore_eos": True}
# rows, pieces of a prompt and blocks that make requests wait, mix and share
SMALL_BATCH = {"max_num_seqs": 4, "max_num_batched_tokens": 320, "block_size": 32}
# a budget that holds every context: fast steps read all that full attention reads
HOLDS_ALL = {"budget": 8192, "recent": 16, "t_max": 24, "window_prefill": 1}
SELECTS = {"budget": 96, "recent": 32, "t_max": 16, "window_prefill": 1}


@contextmanager
def engine(extra: dict[str, Any] | None = None, **options: Any) -> Iterator[LLM]:
    """Make an engine: plain, or with sfi and some settings."""
    arguments: dict[str, Any] = {
        "model": str(BUNDLED),
        "dtype": "float32",
        "max_model_len": 8192,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "disable_log_stats": False,
    }
    if extra is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "SfiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    ensure_kv_transfer_shutdown()  # an engine that was refused half way leaves its connector
    llm = LLM(**arguments | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def ask(llm: LLM, prompts: Sequence[Any], **options: Any) -> list[RequestOutput]:
    """Generate greedily from texts or token ids; `max_tokens` may be a list, one for each.

    `salt` is the `cache_salt` that the client gives.
    """
    salt = {"cache_salt": cache_salt} if (cache_salt := options.pop("salt", None)) else {}
    limits = options.pop("max_tokens", 40)
    limits = limits if isinstance(limits, list) else [limits] * len(prompts)
    parameters = [SamplingParams(**GREEDY | {"max_tokens": most} | options) for most in limits]
    whole = [p if isinstance(p, str) else {"prompt_token_ids": p, **salt} for p in prompts]
    return llm.generate(whole, parameters, use_tqdm=False)


def tokens(llm: LLM, prompts: Sequence[Any], **options: Any) -> list[list[int]]:
    """Generate greedily; return each prompt's tokens."""
    return [list(o.outputs[0].token_ids) for o in ask(llm, prompts, **options)]


def told(output: RequestOutput) -> dict[str, Any]:
    """Return what an answer says of its request."""
    report: dict[str, Any] = output.kv_transfer_params["sfi"]
    return report


def planner_of(llm: LLM) -> Planner:
    """Return the planner of an engine in this process."""
    planner: Planner = llm.llm_engine.engine_core.engine_core.scheduler.connector.planner
    return planner


def engine_of_process() -> WorkerEngine:
    """Return the worker's engine of this process."""
    engine: WorkerEngine = get_kv_transfer_group().engine
    return engine


def counted(llm: LLM, name: str) -> float:
    """Return one of vLLM's counters."""
    return sum(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")


def assert_nothing_is_left(llm: LLM) -> None:
    """Check that neither side keeps anything of requests that have ended."""
    planner, worker = planner_of(llm), engine_of_process()
    assert not planner.tracked
    assert sorted(planner.free) == list(range(worker.store.batch))
    # the workers hear of the last slots with the next plan: that of a request that needs none
    tokens(llm, [[5, 6, 7]], max_tokens=1, extra_args={"sfi.enabled": 0})
    assert not vars(worker)["_reading"]
    assert not worker.run.notes
    assert not worker.run.left
    assert all(state.finished for state in worker.run.requests)


def ragged() -> tuple[list[list[int]], list[int]]:
    """Return eleven prompts of 43 to 2,033 tokens, some with a beginning in common, and their lengths."""
    lines, draw = EXAMPLE["prompt"].split("\n"), random.Random(3)
    prompts, limits = [], []
    for _ in range(11):
        count = draw.choice([1, 2, 4, 9, 25, 40])
        start = draw.randrange(len(lines) - count) if count < len(lines) else 0
        text = "\n".join(lines[start : start + count])
        prompts.append(text[: draw.choice([300, 900, 4000, 12000])])
        limits.append(draw.choice([5, 40, 70, 120]))
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    return [tokenizer(text)["input_ids"] for text in prompts], limits


def example_ids() -> list[int]:
    """Return the tokens of the bundled example's prompt."""
    ids: list[int] = AutoTokenizer.from_pretrained(BUNDLED)(EXAMPLE["prompt"])["input_ids"]
    return ids


def reference(prompts: Sequence[Sequence[int]], limits: Any, settings: dict[str, Any], **options: Any) -> list[Any]:
    """Let `sfi_core.generate` complete prompts over transformers; return what it reports of each."""
    model = options.pop("model", None)
    tokenizer = None
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(BUNDLED).float().eval()
        tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    result = sfi_core.generate(
        model, tokenizer, prompts, SfiConfig().replace(**settings), max_new_tokens=limits, stop_token_ids=[], **options
    )
    return result.report.requests


def assert_same(outputs: Sequence[RequestOutput], requests: Sequence[Any]) -> None:
    """Compare vLLM's answers with the reference: tokens, slow steps and what was read."""
    assert [list(o.outputs[0].token_ids) for o in outputs] == [list(r.token_ids) for r in requests]
    assert [told(o)["slow_at"] for o in outputs] == [list(r.slow_at) for r in requests]
    for name in ("read_ratio", "selection_ratio", "cache_read_ratio"):
        ratios, wanted = [told(o)[name] for o in outputs], [getattr(request, name) for request in requests]
        assert ratios == pytest.approx(wanted, abs=1e-12), name
