"""The second stream and CUDA graphs on a device: the tokens of the plain engine, and what ran where."""

import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, SfiConfig
from sfi_core.state.side_stream import RING_PLACES
from sfi_traces.record.timing import TimingObserver
from tests.core.conftest import tiny_qwen3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PROMPTS = [[(7 * place + row) % 96 for place in range(n)] for row, n in enumerate((300, 90, 7, 150))]
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=16, budget=32, t_max=5, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 5)),
)  # fmt: skip
PLAIN = EngineOptions(overlap=False, graphs=False)


@cache
def model():
    return tiny_qwen3(layers=RING_PLACES + 3).cuda()


def complete(engine: EngineOptions, **options):
    options = {"config": CONFIG, "max_new_tokens": 64, "stop_token_ids": (), **options}
    engine = replace(engine, backend="triton")
    return sfi_core.generate(model(), None, options.pop("prompts", PROMPTS), engine=engine, **options).report


def tokens(report) -> list[list[int]]:
    return [request.token_ids for request in report.requests]


@cache
def plain(**options):
    return complete(PLAIN, **options)


def check_replayed(report) -> None:
    """The first step with 1, with 2 and with 3 or 4 slow requests may run unrecorded."""
    once = report.paths.get("graph.eager", 0)
    assert once <= 3
    assert report.paths["graph.replay"] == 63 - once
    assert report.not_replayed == ""


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["sfi", "full-kv", "streaming-llm", "snapkv", "prior-only"])
def test_no_switch_changes_a_token(overlap: bool, graphs: bool, policy: str):
    report = complete(EngineOptions(overlap=overlap, graphs=graphs), policy=policy)
    assert tokens(report) == tokens(plain(policy=policy))
    if graphs:
        check_replayed(report)
    else:
        assert "graph.replay" not in report.paths


def test_the_switches_change_nothing_however_often_it_is_run():
    expected = tokens(plain())
    for _ in range(20):
        assert tokens(complete(EngineOptions(overlap=True, graphs=False))) == expected
        assert tokens(complete(EngineOptions(overlap=True, graphs=True))) == expected


def test_graphs_are_the_default():
    check_replayed(complete(EngineOptions()))


def test_requests_that_end_and_dense_layers_change_nothing():
    free = tokens(plain())
    options = {"stop_token_ids": (free[0][9], free[1][20]), "config": CONFIG.replace(dense_layers=(0, 3))}
    assert tokens(complete(EngineOptions(), **options)) == tokens(complete(PLAIN, **options))


def test_maintenance_runs_on_the_side():
    spans: list = []
    observer = TimingObserver("cuda", spans.extend)
    complete(EngineOptions(graphs=False), observers=[observer])
    observer.flush()
    streams = {(row[2], row[3]) for row in (span.row() for span in spans) if row[0] > 0}
    assert {name for name, stream in streams if stream == "side"} == {"selector", "top_k", "pack"}
    assert all(stream in ("main", "side") for _, stream in streams)


def test_a_model_that_waits_for_the_device_runs_eagerly():
    hook = model().model.norm.register_forward_pre_hook(lambda _, args: (args[0].sum().item(), None)[1])
    try:
        report = complete(EngineOptions())
    finally:
        hook.remove()
    assert tokens(report) == tokens(plain())
    assert report.paths["graph.eager"] == 63
    assert re.search(r"got aten::(_local_scalar_dense|item) in Qwen3RMSNorm", report.not_replayed)


TIERS = {
    "sfi": {}, "snapkv": {}, "quest": {}, "codescan": {}, "freekv": {"freekv": {"page": 16}},
    "synckv": {"synckv": {"heads": "even"}},
}  # fmt: skip


@pytest.mark.parametrize("policy", TIERS)
def test_two_tiers_change_no_token_however_often_they_are_run(policy: str):
    """Appends, dense reads and recalls over pinned memory, within graphs and without."""
    longer = 3 if policy == "codescan" else 1  # its codes and queries take much of such small a cache
    prompts = [longer * prompt for prompt in PROMPTS]
    options = {"policy": policy, "config": CONFIG.replace(**TIERS[policy]), "prompts": prompts}
    expected = tokens(complete(PLAIN, **options))
    for _ in range(5):
        report = complete(EngineOptions(kv_device_budget="90%", kv_page=16), **options)
        assert tokens(report) == expected
        assert 0 < report.kv_tiers.device_bytes <= report.kv_tiers.allowed_bytes


def test_pages_of_the_host_take_no_memory_of_the_device():
    before = torch.cuda.memory_allocated()
    with sfi_core.slow_fast(model(), None, CONFIG, engine=EngineOptions(kv_device_budget="90%", kv_page=16)) as session:
        ids = torch.tensor([PROMPTS[0]], device="cuda")
        model().generate(ids, max_new_tokens=8, do_sample=False)
        held = torch.cuda.memory_allocated() - before
        tiers = session.report.kv_tiers
        assert tiers.device_bytes <= held < tiers.device_bytes + tiers.host_bytes
