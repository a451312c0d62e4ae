"""Fast steps that numba compiles give what PyTorch's give: tokens, events, counts."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from threading import current_thread
from typing import Any

import numpy as np
import pytest
import torch

from sfi_core import AuditConfig, EngineOptions, SfiConfig, generate, load
from sfi_core.engine.ledger import Meter, steady_seconds
from sfi_kernels import compiled
from sfi_kernels.compiled import telling
from sfi_kernels.decode_attention import sparse_attention
from tests.architectures import prompts, tiny
from tests.fakes import RecordingObserver, positions

pytest.importorskip("numba")
from numba.core import event

from sfi_kernels.loops import attention

CONFIG = SfiConfig(sink=2, recent=6, budget=9, window_prefill=8, trigger_policy="never")
ROWS = prompts(70, 9, 33)
LOSSLESS = EngineOptions(lossless=True)


def decode(model: Any, rows: Any, policy: str, **options: Any) -> tuple[Any, RecordingObserver]:
    seen = RecordingObserver()
    options = {"config": CONFIG, "max_new_tokens": 24, "stop_token_ids": (), **options}
    result = generate(
        model, options.pop("tokenizer", None), rows, options.pop("config"), policy=policy, observers=[seen],
        audit=None if "engine" in options else AuditConfig(every=5), **options,
    )  # fmt: skip
    return result.report, seen


def both(monkeypatch: pytest.MonkeyPatch, *run: Any, **options: Any) -> list[Any]:
    """Run compiled, then as on a machine without numba."""
    compiled = decode(*run, **options)
    monkeypatch.setattr("sfi_kernels.compiled.why_not", lambda: "not installed")
    return [compiled, decode(*run, **options)]


def assert_same(compiled: Any, plain: Any) -> None:
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
        ("llama", "sfi", {"config": CONFIG.replace(trigger_policy="stride", stride=4)}),  # packed, and evidence
        ("gemma-2", "codescan", {}),  # a soft cap
        ("gpt-oss", "quest", {}),  # learned sinks
        pytest.param("gpt-oss", "codescan", {"max_batch": 2}, marks=pytest.mark.exhaustive),
        pytest.param("llama", "oracle-top-k", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_a_ragged_batch_decodes_and_tells_the_same(monkeypatch, label: str, policy: str, options):
    assert_same(*both(monkeypatch, tiny(label), ROWS, policy, **options))


@pytest.mark.parametrize(("policy", "rule"), [("codescan", "never"), ("sfi", "boundary")])
def test_the_bundled_model_gives_the_same_tokens(monkeypatch, policy: str, rule: str):
    model, tokenizer = load()
    text = "Belora hid a red lantern. Tavo keeps a green kite. " * 30
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


def fresh(tmp_path: Any, script: str) -> str:
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

    def files() -> dict[str, Path]:
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
    ask = compiled.unusable.__wrapped__  # not what has been told before
    monkeypatch.setattr("numba.config.DISABLE_JIT", 1)
    assert ask() == "NUMBA_DISABLE_JIT is set"
    monkeypatch.setitem(sys.modules, "numba.core", None)
    assert ask().startswith("not importable: ")


def test_numba_is_not_used_beside_vllm_imported_later(monkeypatch):
    assert not compiled.why_not()
    monkeypatch.setitem(sys.modules, "vllm", sys)
    assert compiled.why_not() == "not beside vLLM"


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

    def noted(*arguments: Any) -> None:
        used.add(current_thread().name)
        attend(*arguments)

    monkeypatch.setattr(attention, "attend", noted)
    shared = decode(model, ROWS, "codescan")
    assert len(used) > 1
    for mine, theirs in zip(shared[0].requests, alone[0].requests, strict=True):
        assert mine.token_ids == theirs.token_ids
    for mine, theirs in zip(shared[1].selections, alone[1].selections, strict=True):
        assert positions(mine.index_HK) == positions(theirs.index_HK)
