"""Whole runs under a device budget: the tokens are those of runs whose whole cache is on the device."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import SfiConfig
from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.generation.read_prompt import read_prompt
from sfi_core.hosts.transformers.slow_fast import slow_fast
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.device_budget import DeviceBudget
from sfi_core.settings.engine import EngineOptions
from sfi_core.state.side import InOrder
from sfi_core.state.two_tier import TwoTierStore
from tests.architectures import padded, prompts, tiny
from tests.fakes import RecordingObserver, use_references
from tests.schedules import AnyTime, Lazy, Watching

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="schedules of CPU tensors")

ROWS = prompts(150, 61, 5)
CONFIG = SfiConfig(
    slow_start=1, span=0, sink=3, recent=8, budget=10, t_max=4, window_prefill=4,
    trigger_token_ids=tuple(range(0, 300, 9)),
).replace(
    synckv={"heads": "even", "representatives": 1, "stride": 4},
    freekv={"page": 8, "tau": 0.7},
    baseline={"page": 8},
)  # fmt: skip
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sfi": ("sfi", {}),
    "sliding": ("sfi", {"recent_mode": "sliding", "dense_layers": (1,)}),
    "correction": ("sfi", {"correction": 0.7}),
    "representatives": ("sfi", {"representatives": "even", "correction": 0.5}),
    "snapkv": ("snapkv", {}),
    "quest": ("quest", {}),
    "freekv": ("freekv", {}),
    "freekv without a dense layer": ("freekv", {"freekv": {"first_layer_dense": False}}),
    "synckv": ("synckv", {}),
    "synckv sparse": ("synckv", {"synckv": {"suspension": "sparse"}}),
    "streaming-llm": ("streaming-llm", {}),
}
BESIDE = ("sfi", "correction", "quest", "freekv", "synckv")


def complete(
    method: str = "sfi",
    budget: str | None = None,
    label: str = "qwen3",
    *,
    page: int = 8,
    **options: Any,
) -> Any:
    """Complete the prompts; with a budget under two tiers."""
    policy, changes = METHODS[method]
    return sfi_core.generate(
        tiny(label), None, options.pop("rows", ROWS), CONFIG.replace(**changes), policy=policy,
        stop_token_ids=(), engine=EngineOptions(kv_device_budget=budget, kv_page=page),
        **{"max_new_tokens": 14, **options},
    )  # fmt: skip


def tokens(result: Any) -> list[list[int]]:
    return [request.token_ids for request in result.report.requests]


@cache
def on_the_device(method: str, label: str = "qwen3") -> list[list[int]]:
    return tokens(complete(method, label=label))


@pytest.mark.parametrize("page", [1, 3, 8])
@pytest.mark.parametrize("method", METHODS)
def test_a_budget_changes_no_token(method: str, page: int):
    result = complete(method, "100kB", page=page)
    assert tokens(result) == on_the_device(method)
    tiers = result.report.kv_tiers
    assert tiers.device_bytes <= 100_000 < tiers.host_bytes
    assert tiers.offloaded_bytes > 0


@pytest.mark.parametrize("label", ["gemma-2", "gpt-oss", "cohere-2", "deepseek-v3", "gpt-2"])
@pytest.mark.parametrize("method", ["sfi", "representatives", "freekv", "synckv"])
def test_a_budget_changes_no_token_of_other_architectures(label: str, method: str):
    found = tokens(complete(method, "1MB", label))
    assert found == on_the_device(method, label)


@pytest.mark.parametrize(
    "options", [{"max_batch": 1}, {"max_batch": 2}, {"prefill_chunk": 7}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_neither_waiting_nor_chunks_change_a_token(method: str, options: dict[str, Any]):
    expected = tokens(complete(method, **options))
    assert tokens(complete(method, "500kB", **options)) == expected


@pytest.mark.parametrize("method", ["snapkv", "sfi"])
def test_a_short_prompt_that_generates_much_keeps_its_recent_tokens(method: str):
    """Its window grows by what it generates, not by what the capacity leaves the longest prompt."""
    options = {"rows": prompts(130, 20), "max_new_tokens": [2, 70]}
    if method == "sfi":
        METHODS["never"] = ("sfi", {"trigger_policy": "never"})
        method = "never"
    expected = tokens(complete(method, **options))
    assert tokens(complete(method, "500kB", **options)) == expected


def test_all_heads_of_a_resident_layer_are_read_from_the_device():
    """FreeKV's first layer is left dense: with room for the layer, dense reads stream nothing."""
    little, much = (complete("freekv", budget) for budget in ("100kB", "400kB"))
    assert tokens(little) == tokens(much) == on_the_device("freekv")
    streamed = [result.report.kv_tiers.streamed_bytes for result in (little, much)]
    assert streamed[1] < streamed[0] / 2


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch):
    """Complete with a side of one's own for the store."""

    def run(method: str, side: Any, **options: Any) -> Any:
        monkeypatch.setattr("sfi_core.hosts.transformers.stores.side_of", lambda *_, **__: side)
        return complete(method, "500kB", observers=[Watching(side)], **options)

    return run


@pytest.mark.parametrize("options", [{}, {"max_batch": 1, "max_new_tokens": [5, 9, 14]}], ids=str)
@pytest.mark.parametrize("side", [Lazy, *(lambda seed=seed: AnyTime(seed) for seed in range(2))])
@pytest.mark.parametrize("method", BESIDE)
def test_every_legal_schedule_gives_what_the_code_s_order_gives(
    beside: Any, method: str, side: Any, options: dict[str, Any]
):
    made, expected = side(), beside(method, InOrder(), **options)
    found = beside(method, made, **options)
    assert tokens(found) == tokens(expected)
    ours, theirs = (result.report.kv_tiers for result in (found, expected))
    assert ours.recalled_bytes == theirs.recalled_bytes > 0
    assert ours.offloaded_bytes == theirs.offloaded_bytes
    assert made.most > 1, "jobs were late"


@pytest.mark.parametrize("method", BESIDE)
def test_a_step_that_does_not_wait_for_its_rows_shows(
    beside: Any, monkeypatch: pytest.MonkeyPatch, method: str
):
    """Or the schedules above would not find fault with code that waits nowhere."""
    expected = tokens(beside(method, InOrder()))
    side = Lazy()
    wait = side.wait
    # recalls have odd places
    side.wait = lambda place: None if place > 0 and place % 2 else wait(place)  # type: ignore[method-assign]
    side.join = lambda: None  # type: ignore[method-assign]
    assert tokens(beside(method, side)) != expected


def test_a_block_that_is_read_before_it_has_come_shows(beside: Any):
    expected = tokens(beside("sfi", InOrder()))
    side = Lazy()
    wait = side.wait
    side.wait = lambda place: None if place < 0 else wait(place)  # type: ignore[method-assign]
    assert tokens(beside("sfi", side)) != expected


@pytest.mark.parametrize("method", ["sfi", "freekv", "synckv"])
def test_observers_and_audits_change_nothing_and_add_up(method: str):
    observer = RecordingObserver()
    result = complete(method, "500kB", observers=[observer], audit=AuditConfig(every=2, fast=True))
    plain = complete(
        method, observers=[other := RecordingObserver()], audit=AuditConfig(every=2, fast=True)
    )
    assert tokens(result) == tokens(plain) == on_the_device(method)
    told = sum(int(e.rows_H.sum()) * e.row_bytes for e in observer.recalls if e.step > 0)
    tiers = result.report.kv_tiers
    assert told == tiers.recalled_bytes > 0
    steps = len(result.report.requests[0].token_ids) - 1
    assert tiers.recalled_bytes_per_step == pytest.approx(told / steps)
    assert len(observer.audits) == len(other.audits) > 0
    for ours, theirs in zip(observer.audits, other.audits, strict=True):
        assert (ours.request, ours.step, ours.layer) == (theirs.request, theirs.step, theirs.layer)
        torch.testing.assert_close(ours.retained_H, theirs.retained_H)


@pytest.mark.parametrize("method", BESIDE)
def test_the_triton_backend_gives_the_tokens_of_its_whole_cache(
    monkeypatch: pytest.MonkeyPatch, method: str
):
    use_references(monkeypatch)
    options = {"backend": "triton", "page": 16, "rows": prompts(90, 37)}
    expected = tokens(complete(method, **options, page_size=16))
    method_of = METHODS[method]
    METHODS["wider"] = (method_of[0], {**method_of[1], "recent": 16})
    found, whole = (tokens(complete("wider", budget, **options)) for budget in ("500kB", None))
    assert found == whole != expected


def test_the_kernels_run_under_a_budget():
    pytest.importorskip("triton")
    METHODS["wide"] = ("quest", {"recent": 16})
    options = {"page": 16, "rows": prompts(60), "max_new_tokens": 4}
    result = complete("wide", "1MB", backend="triton", **options)
    assert tokens(result) == tokens(complete("wide", "1MB", **options))
    launched = {kernel.name for kernel in result.report.kernels}
    assert {"append", "recall"} <= launched
