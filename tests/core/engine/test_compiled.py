"""Fast steps that are compiled, by numba or with the model's modules, give the eager ones' tokens, events, counts."""

import copy
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import numpy as np
import pytest
import torch
from numba.core import event
from transformers import LlamaConfig, LlamaForCausalLM

from sfi_core import AuditConfig, EngineOptions, SfiConfig, generate, load
from sfi_core.engine import compiled_steps
from sfi_core.engine.ledger import Meter, steady_seconds
from sfi_core.hosts.transformers import replays
from sfi_core.measure.evaluation.teacher_forcing import teacher_force
from sfi_core.settings.config import SyncKVConfig
from sfi_kernels import compiled
from sfi_kernels.compiled import telling
from sfi_kernels.decode_attention import sparse_attention
from sfi_kernels.loops import attention
from tests.architectures import SMALL, prompts, tiny
from tests.covering import first
from tests.fakes import Listener, RecordingObserver, positions

pytest.importorskip("numba")


CONFIG = SfiConfig(sink=2, recent=6, budget=9, window_prefill=8, trigger_policy="never")
ROWS = prompts(70, 9, 33)
LOSSLESS = EngineOptions(lossless=True)


def decode(model, rows, policy: str, **options):
    seen = RecordingObserver()
    options = {"config": CONFIG, "max_new_tokens": 24, "stop_token_ids": (), **options}
    result = generate(
        model, options.pop("tokenizer", None), rows, options.pop("config"), policy=policy, observers=[seen],
        audit=None if "engine" in options else AuditConfig(every=5), **options,
    )  # fmt: skip
    return result.report, seen


def both(monkeypatch: pytest.MonkeyPatch, *run, **options) -> list:
    compiled = decode(*run, **options)
    monkeypatch.setattr("sfi_kernels.compiled.why_not", lambda: "not installed")
    return [compiled, decode(*run, **options)]


def assert_same(compiled, plain) -> None:
    (own, seen), (other, also) = compiled, plain
    for path in ("sparse_attention", "dense_attention"):
        assert own.paths.get(f"numba.{path}") == other.paths.get(f"torch.{path}")
    assert own.paths["numba.sparse_attention"]
    assert own.paths.get("torch.pack") == other.paths.get("torch.pack")
    assert not any(path.startswith("numba") for path in other.paths)
    for mine, theirs in zip(own.requests, other.requests, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.read_ratio == theirs.read_ratio
        assert mine.selection_ratio == theirs.selection_ratio
    assert seen.spans == also.spans
    assert len(seen.selections) == len(also.selections) > 0
    for mine, theirs in zip(seen.selections, also.selections, strict=True):
        assert positions(mine.index_HK) == positions(theirs.index_HK)
    assert len(seen.audits) == len(also.audits) > 0
    for mine, theirs in zip(seen.audits, also.audits, strict=True):
        for name in ("retained_H", "output_error_H", "read_HK"):
            torch.testing.assert_close(getattr(mine, name), getattr(theirs, name), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("label", "policy", "options"),
    [
        ("qwen3", "codescan", {"page_size": 16}),
        # packed, and evidence; pooled over as many positions as a short prompt has, all would be ties
        ("llama", "sfi", {"config": CONFIG.replace(trigger_policy="stride", stride=4, span=1)}),
        ("gemma-2", "codescan", {}),  # a soft cap
        ("gpt-oss", "quest", {}),  # learned sinks
        pytest.param("gpt-oss", "codescan", {"max_batch": 2}, marks=pytest.mark.exhaustive),
        pytest.param("llama", "oracle-top-k", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_ragged_batch_decodes_and_tells_the_same(monkeypatch, label: str, policy: str, options):
    assert_same(*both(monkeypatch, tiny(label), ROWS, policy, **options))


NAMES = (
    "Belora",
    "Tavo",
    "Marophe",
    "Eskard",
    "Velux",
    "Halisk",
)  # no sentence twice: scores of equal ones are near ties


@pytest.mark.parametrize(("policy", "rule"), [("codescan", "never"), ("sfi", "boundary")])
def test_the_bundled_model_gives_the_same_tokens(monkeypatch, policy: str, rule: str):
    model, tokenizer = load()
    colors = ("red", "green", "old", "paper", "silver", "heavy")
    things = ("lantern", "kite", "sword", "carpet", "vase", "bottle", "tent", "book", "doll", "ladder")
    text = " ".join(
        f"{name} hid a {color} {thing}." for name, color in zip(NAMES, colors, strict=True) for thing in things
    )
    rows = [tokenizer(text)["input_ids"]]
    config = CONFIG.replace(sink=4, recent=16, budget=64, trigger_policy=rule, triggers=(".",))
    assert_same(*both(monkeypatch, model, rows, policy, config=config, tokenizer=tokenizer))


@pytest.mark.parametrize("policy", ["codescan", "sfi"])
def test_lossless_drafts_are_full_attentions_tokens(monkeypatch, policy: str):
    (compiled, _), (plain, _) = both(monkeypatch, tiny("qwen3"), ROWS, policy, engine=LOSSLESS)
    full, _ = decode(tiny("qwen3"), ROWS, "full-kv")
    assert compiled.paths["numba.sparse_attention"]
    assert compiled.paths["numba.dense_attention"]
    for mine, theirs, wanted in zip(compiled.requests, plain.requests, full.requests, strict=True):
        assert mine.token_ids == theirs.token_ids == wanted.token_ids


def test_a_position_beyond_the_cache_is_refused():
    page, one = torch.zeros(1, 1, 8, 8), torch.ones(1, dtype=torch.int32)
    position = torch.tensor([[[0, 7]]], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"^a packed position lies beyond the cached tokens$"):
        sparse_attention.numba(
            torch.zeros(1, 1, 1, 8), page[:, :, :0], page[:, :, :0], 2 * one[None], page, page, 0 * one[None], 3 * one,
            5 * one, scale=1.0, position_BHS=position,
        )  # fmt: skip


def fresh(tmp_path, script: str) -> str:
    """Run in a new process, with compiled code in a folder of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


SCRIPT = """
from sfi_kernels.compiled import telling, why_not
import sys, torch
assert "numba" not in sys.modules
print(why_not() or "usable", end=" ")
if not why_not():
    from sfi_kernels.loops.attention import attend
    from sfi_kernels.numba_ops import multiply_few
    from sfi_kernels.tables import row_of
    with telling(lambda: print("compiling", end=" ")):
        weight = torch.arange(64.0).view(2, 32)
        row = multiply_few(row_of(0, weight.shape, weight), torch.eye(32)[1:2]).view(-1)
    print(*map(int, row.tolist()), "kept" if attend.stats.cache_path else "not kept")
"""


@pytest.mark.exhaustive
def test_a_compilation_is_told_once_and_kept_where_a_folder_can_be_written(tmp_path):
    assert fresh(tmp_path, SCRIPT) == "usable compiling 1 33 kept\n"
    assert fresh(tmp_path, SCRIPT) == "usable 1 33 kept\n"


@pytest.mark.exhaustive
def test_without_a_folder_every_run_compiles(tmp_path):
    nowhere = """
from numba.core import caching
caching.CacheImpl._locator_classes = []
""" + SCRIPT.replace('assert "numba" not in sys.modules', "")
    assert fresh(tmp_path, nowhere) == "usable compiling 1 33 not kept\n"


def double(numbers):
    numbers *= 2


def test_a_run_goes_on_where_the_folder_is_full_or_damaged(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))

    def files():
        function, numbers = compiled.entry(double), np.ones(2)
        function(numbers)
        assert numbers.tolist() == [2, 2]
        return {path.suffix: path for path in tmp_path.rglob("*.*")}

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))  # the index fits, the code does not
    assert set(files()) == {".nbi"}
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    kept = files()
    whole = kept[".nbc"].read_bytes()
    kept[".nbc"].write_bytes(whole[:100])
    files()
    assert kept[".nbc"].stat().st_size == len(whole)
    kept[".nbi"].write_bytes(b"")
    files()
    assert kept[".nbi"].stat().st_size > 0


def test_numba_may_be_switched_off_or_broken(monkeypatch):
    ask = compiled.why_not.__wrapped__  # not what has been told before
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert ask() == "NUMBA_DISABLE_JIT is set"
    monkeypatch.setitem(sys.modules, "numba.core", None)
    assert ask().startswith("not importable: ")


def test_vllm_may_look_into_what_numba_brought():
    """Its start reads the `__dict__` of whatever any module holds, and asks it for a `kernel`."""
    assert not compiled.why_not()
    held = [value for module in list(sys.modules.values()) for value in [*getattr(module, "__dict__", {}).values()]]
    libraries = [value for value in held if type(value).__module__ == "llvmlite.binding.ffi"]
    assert libraries
    assert not any(vars(library).get("kernel") for library in libraries if hasattr(library, "__dict__"))


def test_a_thread_of_the_pool_leaves_its_maker_s_core():
    cores = os.sched_getaffinity(0)
    if len(cores) == 1:
        pytest.skip("one core")

    def bound() -> set[int]:
        os.sched_setaffinity(0, {min(cores)})  # as OpenMP binds the thread that vLLM's model runs in
        with compiled.pool.__wrapped__() as pool:
            return pool.submit(os.sched_getaffinity, 0).result()

    with ThreadPoolExecutor(1) as own:
        assert own.submit(bound).result() == cores


def test_an_outer_telling_keeps_its_own():
    heard: list[str] = []
    with telling(lambda: heard.append("outer")), telling(lambda: heard.append("inner")):
        from sfi_kernels import compiled  # noqa: PLC0415

        compiled._heard.get()()  # noqa: SLF001
    assert heard == ["outer"]


def compile_for(seconds: float) -> None:
    """Compile a function that calls another one, as far as the listeners hear."""
    with event.trigger_event("numba:compile"), event.trigger_event("numba:compile"):
        time.sleep(seconds)


def test_the_time_of_a_step_leaves_compilation_out_and_the_report_tells_it():
    assert not compiled.why_not()
    meter, began = Meter(), time.perf_counter()
    for _ in range(2):
        meter.begin()
        compile_for(0.2)
        meter.lap((0, 1), prefill=False)
    wall = time.perf_counter() - began
    assert 0.4 <= meter.compiling_seconds <= wall
    assert meter.decode_seconds <= wall - 0.4
    assert meter.prefill_seconds == 0


def test_a_run_s_steady_speed_is_that_of_the_median_step_of_each_kind():
    """Three fast steps with a hiccup, and two slow ones of which the first brings cold code."""
    assert steady_seconds({(0, 1): [1.0, 9.0, 2.0], (1, 0): [7.0, 5.0]}) == 3 * 2 + 2 * 6
    report, _ = decode(tiny("llama"), ROWS, "sfi", config=CONFIG.replace(trigger_policy="stride", stride=6))
    assert report.steady_tokens_per_second > 0
    only, _ = decode(tiny("llama"), ROWS, "full-kv", max_new_tokens=2)
    assert only.steady_tokens_per_second == pytest.approx(only.decode_tokens_per_second), "one step"


def test_heads_shared_by_threads_give_the_same(monkeypatch):
    model = tiny("llama")
    alone = decode(model, ROWS, "codescan")
    monkeypatch.setattr(compiled, "WORTH", 1e-9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    used: set[str] = set()
    attend = attention.attend

    def noted(*arguments) -> None:
        used.add(current_thread().name)
        attend(*arguments)

    monkeypatch.setattr(attention, "attend", noted)
    shared = decode(model, ROWS, "codescan")
    assert len(used) > 1
    for mine, theirs in zip(shared[0].requests, alone[0].requests, strict=True):
        assert mine.token_ids == theirs.token_ids
    for mine, theirs in zip(shared[1].selections, alone[1].selections, strict=True):
        assert positions(mine.index_HK) == positions(theirs.index_HK)


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
