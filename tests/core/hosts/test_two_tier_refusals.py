"""What a run under a device budget refuses, in one line, before it begins."""

from dataclasses import replace

import pytest
import torch

import sfi_core
from sfi_core import EngineOptions, SfiConfig, read_prompt, slow_fast
from sfi_core.errors import BackendError, ConfigError, MemoryForecastError
from sfi_core.hosts.transformers.cache import CACHE_NAME
from sfi_core.policies import POLICIES
from sfi_core.state.host_memory import HostMemory
from tests.architectures import prompts, tiny

ROWS = prompts(60)
CONFIG = SfiConfig(sink=2, recent=16, budget=10, window_prefill=4, trigger_token_ids=(7,))
OFFLOADING = ", ".join(sorted(name for name, policy in POLICIES.items() if policy.offloads))


def engine(budget: str = "1MB", page: int = 16, **options) -> EngineOptions:
    return EngineOptions(kv_device_budget=budget, kv_page=page, **options)


def complete(options: EngineOptions, config: SfiConfig = CONFIG, **others):
    return sfi_core.generate(
        tiny("qwen3"), None, ROWS, config, engine=options, stop_token_ids=(), **{"max_new_tokens": 4, **others}
    )


TOO_SMALL = (
    "kv_device_budget must hold sink + recent + one page, at least 35128 bytes, got {}; raise "
    "kv_device_budget, or lower the batch, budget or recent"
)
REFUSALS = {
    "policy": (
        engine(), "oracle-top-k",
        (f"policy oracle-top-k cannot run under kv_device_budget; those that can: {OFFLOADING}"),
    ),
    "page": (
        engine(page=32), "quest",
        ("recent must be at least a page of 32 tokens under kv_device_budget, got 16; lower "
         "engine.kv_page"),
    ),
    "size": (engine("1kB"), "sfi", TOO_SMALL.format(1000)),
    "share": (engine("1%"), "sfi", TOO_SMALL.format(327)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_run_is_refused(case: str):
    options, policy, message = REFUSALS[case]
    with pytest.raises(ConfigError) as caught:
        complete(options, policy=policy)
    assert str(caught.value) == message


def test_a_window_that_outgrows_the_budget_is_refused():
    """It grows by t_max; the smallest budget holds it where it does not grow."""
    changes = {"t_max": 64, "trigger_policy": "t-max"}
    with pytest.raises(ConfigError, match=r"must hold the longest recent window, .* lower t_max"):
        complete(engine("60kB"), CONFIG.replace(**changes), max_new_tokens=64)
    sliding = CONFIG.replace(**changes, recent_mode="sliding")
    assert complete(engine("60kB"), sliding, max_new_tokens=64).report.kv_tiers is not None


def test_a_page_that_is_no_multiple_of_a_tile_is_refused_under_triton():
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the model of these tests is on the CPU")
    with pytest.raises(BackendError) as caught:
        complete(replace(engine(page=12), backend="triton"))
    assert str(caught.value) == ("engine.kv_page must be a multiple of 16 tokens under the triton backend, got 12")


def test_host_memory_that_does_not_hold_the_cache_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sfi_core.hosts.transformers.stores.free_bytes", lambda device: 20_000)
    with pytest.raises(MemoryForecastError) as caught:
        complete(engine(), policy="snapkv")
    assert str(caught.value) == (
        "host memory must hold the whole cache, 0.00 GB, got 0.00 GB free; lower the batch or max_new_tokens"
    )


def test_a_run_of_unknown_length_is_refused_where_it_outgrows_its_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sfi_core.hosts.transformers.session.UNKNOWN_CAPACITY", 4)
    model, ids = tiny("qwen3"), torch.tensor(ROWS)

    def go_on(cache, position: int) -> None:
        position_ids = torch.tensor([[position]])
        model(input_ids=ids[:, :1], position_ids=position_ids, **{CACHE_NAME: cache})

    options = engine("1MB")
    with torch.inference_mode(), slow_fast(model, None, CONFIG, engine=options) as session:
        cache = session.cache()
        model(input_ids=ids, **{CACHE_NAME: cache})
        for position in range(60, 64):
            go_on(cache, position)
        with pytest.raises(ConfigError) as caught:
            go_on(cache, 64)
    assert str(caught.value) == (
        "a run under kv_device_budget must state its length, got 65 tokens after room for 64; give max_new_tokens"
    )


def test_prompts_that_were_read_before_move_into_two_tiers():
    shared = read_prompt(tiny("qwen3"), None, ROWS, capacity=64)
    run = complete(engine(), shared=shared)
    assert run.report.kv_tiers is not None
    alone = complete(engine())
    tokens, expected = ([r.token_ids for r in result.report.requests] for result in (run, alone))
    assert tokens == expected


def test_a_backend_that_cannot_read_host_memory_is_refused_on_a_gpu():
    with slow_fast(tiny("qwen3"), None, CONFIG, engine=engine()) as session, pytest.raises(BackendError) as caught:
        session.tiers.store(1, 64, 4, torch.device("cuda"), torch.float32)
    assert str(caught.value) == (
        "kv_device_budget on a cuda device needs the triton backend, which reads host memory, got torch"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch pins memory here")
def test_memory_that_the_system_does_not_pin_is_refused_with_its_size():
    with pytest.raises(MemoryForecastError) as caught:
        HostMemory(1000).take((3, 10), torch.float32, pinned=True)
    assert str(caught.value) == (
        "host memory must be pinned under kv_device_budget, but the system refuses 512 bytes; lower the batch or "
        "max_new_tokens"
    )


def test_pinned_memory_comes_in_pieces_of_powers_of_two(monkeypatch: pytest.MonkeyPatch):
    """But for the last: PyTorch would round each layer up by itself."""
    memory, sizes, empty = HostMemory(7 * 40), [], torch.empty

    def plain(size, *, dtype, pin_memory):
        sizes.append(size)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", plain)
    taken = [memory.take((2, 5), torch.float32, pinned=True).fill_(number) for number in range(7)]
    assert sizes == [256, 40]
    assert all((part == number).all() for number, part in enumerate(taken))
