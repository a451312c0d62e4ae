"""Steps that are one compiled call give the tokens, events and counts of the model's modules."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sfi_core import AuditConfig, EngineOptions, SfiConfig, generate
from sfi_core.engine import compiled_steps
from sfi_core.hosts.transformers import replays
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.policies import POLICIES
from sfi_core.policies.base import BatchContext, Companion
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.settings.config import SyncKVConfig
from sfi_kernels.choice import Choice
from tests.architectures import SMALL, prompts, tiny
from tests.covering import first
from tests.fakes import Listener, positions

pytest.importorskip("numba")


ROWS = prompts(70, 9, 33)
CHOOSING = SfiConfig(sink=2, recent=6, budget=9, window_prefill=8, trigger_policy="never")


def decode_steps(model, policy: str, rows=ROWS, **options):
    seen = Listener()
    engine = EngineOptions(lossless=options.pop("lossless", False), graphs=options.pop("graphs", None))
    options = {"max_new_tokens": 24, "stop_token_ids": (), **options}
    config = CHOOSING if policy == "codescan" else SMALL
    if policy == "synckv":
        config = config.replace(synckv=SyncKVConfig(heads="even"))
    result = generate(model, None, rows, config, policy=policy, observers=[seen], engine=engine, **options)
    return result.report, seen


def assert_same_steps(label: str, policy: str, **options):
    model = tiny(label)
    (ours, seen), (plain, also) = (
        decode_steps(model, policy, **options),
        decode_steps(model, policy, graphs=False, **options),
    )
    assert "step.compiled" not in plain.paths
    assert ours.paths["step.compiled"], ours.not_compiled
    for mine, theirs in zip(ours.requests, plain.requests, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.cache_read_ratio == theirs.cache_read_ratio
        assert mine.slow_at == theirs.slow_at
    for name in ("selections", "audits", "steps"):
        assert len(getattr(seen, name)) == len(getattr(also, name))
    for mine, theirs in zip(seen.selections, also.selections, strict=True):
        assert (mine.request, mine.step, mine.layer) == (theirs.request, theirs.step, theirs.layer)
        assert positions(mine.index_HK) == positions(theirs.index_HK)
        assert mine.diagnostics.keys() == theirs.diagnostics.keys()
        for key, value in mine.diagnostics.items():
            torch.testing.assert_close(value, theirs.diagnostics[key], rtol=1e-3, atol=1e-4, equal_nan=True)
    return ours, seen


OF_THE_ENGINE = ["quest", "freekv", "synckv", "oracle-top-k", "random-k"]  # whose attention is between two calls


@pytest.mark.parametrize("policy", first(["full-kv", "sfi", "codescan", "snapkv", "streaming-llm", *OF_THE_ENGINE], 4))
@pytest.mark.parametrize("label", first(["qwen2", "qwen3"]))  # biases; norms of heads
def test_a_ragged_batch(label: str, policy: str):
    ours, _ = assert_same_steps(label, policy)
    assert ours.paths.get("step.eager", 0) == 0


class ChoosesByEvidence(Companion, SFI):
    """Selects at slow steps and chooses at fast ones."""

    def choose(self, batch: BatchContext) -> Choice | None:
        return batch.read(SFI.select_after(self, batch.evidence())) if batch.fast else None


def test_a_policy_that_selects_and_chooses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(POLICIES, "chooses", ChoosesByEvidence)
    assert_same_steps("llama", "chooses")


@pytest.mark.parametrize("policy", first(["sfi", "codescan", "quest"]))
@pytest.mark.parametrize(
    "options",
    [{"lossless": True}, {"page_size": 16}, {"max_batch": 2}, {"lossless": True, "max_batch": 2}],
    ids=["lossless", "pages", "joining", "joining lossless"],
)
def test_other_batches(policy: str, options: dict):
    assert_same_steps("llama", policy, **options)


@pytest.mark.parametrize(
    ("policy", "options"),
    first(
        [
            ("sfi", {}),
            ("codescan", {"rows": prompts(70, 30), "max_batch": 1}),
            ("quest", {}),
            ("sfi", {"audit": AuditConfig(every=5)}),
        ],
        2,
    ),
    ids=["sfi", "one after the other", "quest", "audited"],
)
def test_sliding_windows_of_one_request(policy: str, options: dict):
    assert_same_steps("gemma-3", policy, **{"rows": ROWS[:1], **options})


def test_a_window_that_moves_in_its_buffer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sfi_core.hosts.transformers.window_layers.SPARE", 3)
    assert_same_steps("gemma-2", "full-kv", rows=ROWS[:1])  # and soft caps


@pytest.mark.parametrize("policy", first(["full-kv", "sfi", "codescan"]))
def test_threads_share_a_step(monkeypatch: pytest.MonkeyPatch, policy: str):
    monkeypatch.setattr(replays.Replays, "threads", 500)
    monkeypatch.setattr(compiled_steps, "PART", 8)
    assert_same_steps("llama", policy)
    assert_same_steps("llama", policy, lossless=policy != "full-kv")


def test_two_runs_at_once_do_not_wait_for_each_other_s_threads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(replays.Replays, "threads", 500)
    wanted = [request.token_ids for request in decode_steps(tiny("llama"), "full-kv")[0].requests]
    models = [tiny("llama"), copy.deepcopy(tiny("llama"))]
    with ThreadPoolExecutor(2) as threads:
        reports = [job.result(60) for job in [threads.submit(decode_steps, model, "full-kv") for model in models]]
    assert all([request.token_ids for request in report.requests] == wanted for report, _ in reports)


def test_evidence_of_a_layer_at_a_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled_steps, "EVIDENCE", 1)
    assert_same_steps("llama", "sfi")


@pytest.mark.parametrize("policy", first(["sfi", "codescan"]))
def test_a_layer_that_is_left_dense(monkeypatch: pytest.MonkeyPatch, policy: str):
    dense = {name: globals()[name].replace(dense_layers=(0,)) for name in ("SMALL", "CHOOSING")}
    for name, config in dense.items():
        monkeypatch.setitem(globals(), name, config)
    assert_same_steps("llama", policy, rows=ROWS[:2])


@pytest.mark.parametrize("policy", first(["sfi", "quest"]))
def test_audited_steps_run_module_by_module(policy: str):
    ours, seen = assert_same_steps("qwen3", policy, audit=AuditConfig(every=5))
    assert ours.paths["step.eager"]
    drift = [event.query_cosine_H for event in seen.audits if event.step > 1]
    assert drift
    assert all(cosine_H.isfinite().all() for cosine_H in drift)


def logits_of(model, policy: str, **options) -> torch.Tensor:
    steps: list[torch.Tensor] = []
    engine = EngineOptions(**options)
    ids = prompts(60)[0]
    report = teacher_force(
        model, None, [ids], 40, lambda step, logits: steps.append(logits.clone()) if step else None, SMALL,
        policy=policy, engine=engine,
    )  # fmt: skip
    assert ("step.compiled" in report.paths) == (engine.graphs is None), report.not_compiled
    return torch.cat(steps)


@pytest.mark.parametrize("policy", first(["full-kv", "quest"]))
@pytest.mark.parametrize("dtype", first([torch.bfloat16, torch.float16]))
def test_a_model_of_16_bits_is_as_close_to_its_weights_in_float32(dtype: torch.dtype, policy: str):
    model = copy.deepcopy(tiny("qwen2")).to(dtype)
    compiled, eager = logits_of(model, policy), logits_of(model, policy, graphs=False)
    exact = logits_of(copy.deepcopy(model).float(), policy, graphs=False)
    assert (compiled - exact).abs().mean() <= (eager - exact).abs().mean()


@pytest.mark.parametrize("policy", first(["full-kv", "sfi", "quest"], 2))  # codescan chooses others among near ties
@pytest.mark.parametrize("kv_dtype", first(["float16", "bfloat16"]))
def test_a_cache_of_16_bits_beside_a_model_of_float32(kv_dtype: str, policy: str):
    model, step = tiny("qwen3"), torch.finfo(getattr(torch, kv_dtype)).eps
    compiled, eager, exact = (
        logits_of(model, policy, **options)
        for options in ({"kv_dtype": kv_dtype}, {"kv_dtype": kv_dtype, "graphs": False}, {"graphs": False})
    )  # fmt: skip
    assert not torch.equal(compiled, exact)
    for logits in (compiled, eager):
        torch.testing.assert_close(logits, exact, rtol=0, atol=4 * step * float(exact.abs().max()))


@pytest.mark.parametrize(("label", "module"), [("olmo-2", "Olmo2DecoderLayer"), ("gpt-2", "GPT2LMHeadModel")])
def test_a_model_that_is_not_known_says_so(label: str, module: str):
    report, _ = decode_steps(tiny(label), "sfi")
    assert report.not_compiled == f"{module}, which compiled steps do not know"
    assert "step.compiled" not in report.paths


@pytest.mark.parametrize(("width", "compiles"), first([(8, True), (20, False), (24, True)], 2))
def test_heads_of_any_width_give_the_same(width: int, compiles: bool):
    sizes = {"head_dim": width, "num_attention_heads": 16, "num_key_value_heads": 8, "initializer_range": 0.3}
    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=300, **sizes)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    (ours, _), (plain, _) = (decode_steps(model, "sfi", graphs=graphs) for graphs in (None, False))
    assert bool(ours.paths.get("step.compiled")) == compiles
    assert [request.token_ids for request in ours.requests] == [request.token_ids for request in plain.requests]


def test_a_hooked_module_runs_its_hook():
    model, seen = tiny("llama"), []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(1))
    report, _ = decode_steps(model, "full-kv", rows=ROWS[:1])
    handle.remove()
    assert len(seen) >= len(report.requests[0].token_ids)
    assert "LlamaMLP" in report.not_compiled
