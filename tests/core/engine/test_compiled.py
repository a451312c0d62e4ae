"""Functions that numba compiles give the tokens, events and counts of PyTorch's."""

from threading import current_thread

import pytest
import torch

from sfi_core import AuditConfig, EngineOptions, SfiConfig, generate, load
from sfi_core.engine.ledger import steady_seconds
from sfi_kernels import compiled
from sfi_kernels.decode_attention import sparse_attention
from sfi_kernels.loops import attention
from tests.architectures import prompts, tiny
from tests.fakes import RecordingObserver, positions

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
    (report, seen), (other, also) = compiled, plain
    for path in ("sparse_attention", "dense_attention"):
        assert report.paths.get(f"numba.{path}") == other.paths.get(f"torch.{path}")
    assert report.paths["numba.sparse_attention"]
    assert report.paths.get("torch.pack") == other.paths.get("torch.pack")
    assert not any(path.startswith("numba") for path in other.paths)
    for mine, theirs in zip(report.requests, other.requests, strict=True):
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
    nouns = ("lantern", "kite", "sword", "carpet", "vase", "bottle", "tent", "book", "doll", "ladder")
    text = " ".join(
        f"{name} hid a {color} {noun}." for name, color in zip(NAMES, colors, strict=True) for noun in nouns
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
    page, ones = torch.zeros(1, 1, 8, 8), torch.ones(1, dtype=torch.int32)
    position = torch.tensor([[[0, 7]]], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"^a packed position lies beyond the cached tokens$"):
        sparse_attention.numba(
            torch.zeros(1, 1, 1, 8), page[:, :, :0], page[:, :, :0], 2 * ones[None], page, page, 0 * ones[None],
            3 * ones, 5 * ones, scale=1.0, position_BHS=position,
        )  # fmt: skip


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
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # or the two would stay for all later tests
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
