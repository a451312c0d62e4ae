"""The forecast of a run's memory: hand arithmetic, and what is really allocated."""

import copy
import resource
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sfi_core
import sfi_core.generation.generate
from sfi_core.distributed.ranks import ALONE
from sfi_core.errors import ConfigError, MemoryForecastError
from sfi_core.generation.batch_plan import BatchPlan, plan_batch
from sfi_core.machine import memory
from sfi_core.settings.config import SfiConfig
from sfi_core.sizes import memory as module
from sfi_core.sizes.memory import CPU_SLACK, Forecast, check_fits, forecast, largest_batch
from sfi_core.sizes.policy import untriggered
from sfi_core.state.layer_pages import LayerShape

CPU = torch.device("cpu")
CONFIG = SfiConfig(slow_start=1, min_gap=0, span=0, sink=3, recent=6, budget=5, trigger_token_ids=(1,))
# the tiny model's: 2 KV heads, keys and values of 8 numbers of 4 bytes
FULL = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4)
SLIDING = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4, window=10)


def expect(model, layers: list[LayerShape], config: SfiConfig = CONFIG, policy: str = "sfi", **changes) -> Forecast:
    sizes = {"batch": 3, "prompt_tokens": 30, "capacity": 40, **changes}
    return forecast(model, layers, untriggered(policy, config), **sizes)


def test_the_forecast_of_a_known_model_equals_hand_arithmetic(tiny_model):
    expected = expect(tiny_model, [FULL, FULL])
    assert expected.kv_bytes == 2 * 128 * 3 * 40  # layers x row x requests x tokens
    assert expected.norm_bytes == 2 * 2 * 4 * 3 * 40
    assert expected.packed_bytes == 2 * 128 * 3 * (3 + 5)
    assert expected.sliding_bytes == 0
    # the MLP's (3 x 32 + 4 x 64) numbers by 90 prompt tokens, and two copies of 96 logits by 3 requests
    assert expected.workspace_bytes == CPU_SLACK * (1408 * 90 + 768 * 3)


def test_sliding_layers_keep_their_window_only(tiny_model):
    expected = expect(tiny_model, [FULL, SLIDING])
    assert expected.kv_bytes == 128 * 3 * 40
    assert expected.norm_bytes == 2 * 4 * 3 * 40
    assert expected.packed_bytes == 128 * 3 * 8
    assert expected.sliding_bytes == (128 + 2 * 4) * 3 * 64  # a ring is whole pages, with the norms of the keys
    wide = replace(SLIDING, window=1000)
    assert expect(tiny_model, [FULL, wide], capacity=70).sliding_bytes == (128 + 2 * 4) * 3 * 128


def test_only_sliding_windows_have_a_mask_of_queries_and_keys(tiny_model):
    """A bool for each of a piece's 3 x 8 queries and of the 18 keys of the window and the piece."""
    full = expect(tiny_model, [FULL], prefill_chunk=8, policy="full-kv")
    both = expect(tiny_model, [FULL, SLIDING], prefill_chunk=8, policy="full-kv")
    assert both.workspace_bytes - full.workspace_bytes == CPU_SLACK * 3 * 8 * 18


def test_no_more_is_packed_than_the_capacity_and_without_a_selection_the_sinks(tiny_model):
    expected = expect(tiny_model, [FULL], CONFIG.replace(budget=1000))
    assert expected.packed_bytes == 128 * 3 * (3 + 40)
    assert expect(tiny_model, [FULL], policy="full-kv").packed_bytes == 128 * 3 * 3


def test_the_selector_s_tensors_count_where_they_are_the_largest(tiny_model):
    """4 numbers for each of 4 query heads x 16 queries and 12 for each of 2 KV heads, by position."""
    expected = expect(tiny_model, [FULL], capacity=1000, prefill_chunk=8)
    assert expected.workspace_bytes == CPU_SLACK * (4 * 4 * 16 + 12 * 2) * 1000 * 4
    lighter = expect(tiny_model, [FULL], capacity=1000, prefill_chunk=8, policy="full-kv")
    assert lighter.workspace_bytes == CPU_SLACK * (1408 * 3 * 8 + 768 * 3)


def test_requests_refreshed_together_need_their_tensors_together(tiny_model):
    """On the triton backend: one logit for each of 4 query heads, 12 numbers for each of 2 KV heads."""
    expected = expect(tiny_model, [FULL], capacity=1000, prefill_chunk=8, refreshed_together=20)
    assert expected.workspace_bytes == CPU_SLACK * (4 + 12 * 2) * 20 * 1000 * 4


def test_codescan_s_first_selection_holds_keys_and_no_logits(tiny_model):
    """A request's keys as they are, in float32, and less their mean; 256 queries have 4 x 4 x 256 logits a position."""
    config = CONFIG.replace(window_prefill=256)
    with sfi_core.slow_fast(tiny_model, None, config=config, policy="codescan") as session:
        codescan = session.forecast(3, 30, 4000, 8).workspace_bytes
    with sfi_core.slow_fast(tiny_model, None, config=config, policy="sfi") as session:
        sfi = session.forecast(3, 30, 4000, 8).workspace_bytes
    assert codescan == CPU_SLACK * 2 * 8 * (4 + 8) * 4000
    assert sfi == CPU_SLACK * (4 * 4 * 256 + 12 * 2) * 4000 * 4


def test_reading_the_prompt_in_pieces_needs_less(tiny_model):
    sizes = [
        expect(tiny_model, [FULL], prompt_tokens=900, capacity=1000, prefill_chunk=chunk)
        for chunk in (0, 2000, 900, 450)
    ]
    whole, longer, same, half = (size.workspace_bytes for size in sizes)
    assert whole == longer == same > half


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("sfi", {}),
        ("streaming-llm", {}),
        ("oracle-top-k", {}),
        ("full-kv", {}),
        ("sfi", {"page_size": 32}),
        ("sfi", {"config": CONFIG.replace(dense_layers=(0,))}),
        ("oracle-top-k", {"config": CONFIG.replace(dense_layers=(1,))}),
    ],
    ids=str,
)
def test_the_forecast_is_what_a_run_allocates(tiny_model, policy: str, options: dict):
    """With pages of 32 tokens 40 take two; a layer left dense has nothing packed."""

    def size(*tensors: torch.Tensor) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    dtype = torch.bfloat16 if options else torch.float32
    model = copy.deepcopy(tiny_model).to(dtype)
    with sfi_core.slow_fast(model, None, **{"config": CONFIG, "policy": policy, **options}) as session:
        expected = session.forecast(3, 30, 40)
        batch = {"input_ids": torch.arange(90).view(3, 30), "attention_mask": torch.ones(3, 30).long()}
        greedy = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        model.generate(**batch, **greedy, max_new_tokens=10)
        pages, segments = session.run.store.layers.values(), session.run.segments.values()
    assert expected.kv_bytes == sum(size(p.key_PHND, p.value_PHNE) for p in pages)
    assert expected.norm_bytes == sum(size(p.norm_PHN) for p in pages)
    assert expected.packed_bytes == sum(size(s.key_BHSD, s.value_BHSE) for s in segments)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "MEMINFO", meminfo)
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "absent")
    return lambda kilobytes: meminfo.write_text(f"MemTotal: 9999999 kB\nMemAvailable: {kilobytes} kB\n")


def test_memory_that_a_control_group_withholds_is_not_free(free, monkeypatch, tmp_path):
    """The least of what the process's group and those above it leave, with files that need not stay."""
    free(9000)
    own_group, group = tmp_path / "own", tmp_path / "groups" / "one" / "job"
    own_group.write_text("1:name=systemd:/\n0::/one/job\n")
    group.mkdir(parents=True)
    for folder, limit, used in ((group, "max", 10), (group.parent, "5000", 4000)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 3\ninactive_file 500\n")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory, "OWN_GROUP", own_group)
    assert memory.free_bytes(CPU) == 1500


def need(**numbers: int) -> Forecast:
    parts = ["resident", "kv", "norm", "packed", "summary", "sliding", "workspace"]
    return Forecast(**{f"{part}_bytes": numbers.get(part, 0) for part in parts})


def test_a_run_that_does_not_fit_is_refused_with_the_numbers(free):
    free(3_000_000)
    expected = need(
        resident=9_000_000_000, kv=2_000_000_000, norm=500_000_000, packed=250_000_000, workspace=1_000_000_000
    )
    with pytest.raises(MemoryForecastError) as caught:
        check_fits(expected, CPU)
    assert str(caught.value) == (
        "the run must fit 3.07 GB of free memory, got a forecast of 3.75 GB (2.50 GB KV cache, "
        "0.25 GB packed, 1.00 GB workspace); lower the batch or max_new_tokens"
    )


@pytest.mark.parametrize(
    ("device", "two_tier", "named"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_a_cache_that_does_not_fit_a_gpu_can_go_to_the_host(monkeypatch, device, two_tier, named):
    monkeypatch.setattr(module, "free_bytes", lambda _: 1000)
    for way in (None, "max_batch to 3"):
        with pytest.raises(MemoryForecastError) as caught:
            check_fits(need(kv=2000, workspace=10), torch.device(device), way, two_tier=two_tier)
        assert ("kv_device_budget" in str(caught.value)) is named
        assert (way or "lower the batch or max_new_tokens") in str(caught.value)
    with pytest.raises(MemoryForecastError, match=r"; lower prefill_chunk$"):
        check_fits(need(kv=10, workspace=2000), torch.device(device), two_tier=two_tier)


def test_what_is_in_use_already_need_not_be_free(free):
    free(1)
    check_fits(need(resident=10**9, kv=1024), CPU)
    with pytest.raises(MemoryForecastError):
        check_fits(need(resident=10**9, kv=1025), CPU)


def test_where_the_free_memory_is_unknown_nothing_is_refused_and_all_run_together(monkeypatch, tmp_path, tiny_model):
    for name in ("MEMINFO", "GROUPS"):
        monkeypatch.setattr(memory, name, tmp_path / "absent")
    assert memory.free_bytes(CPU) is None
    check_fits(need(kv=10**15), CPU)
    assert plan(tiny_model, [[1]] * 30).slots == plan(tiny_model, [[1]] * 30, max_batch=50).slots == 30


def test_generate_refuses_before_it_allocates(free, tiny_model):
    free(1)
    tokens = []
    with pytest.raises(MemoryForecastError, match=r"^the run must fit 0\.00 GB of free memory"):
        sfi_core.generate(tiny_model, None, [[1, 2]], CONFIG, on_token=tokens.append)
    assert tokens == []


class Sized:
    """A session whose requests need a gigabyte each, and one more for all."""

    ranks = ALONE
    tiers = None

    def __init__(self, model) -> None:
        self.model = model

    def forecast(self, batch: int, *sizes: int, graphs: bool, beginning: int) -> Forecast:
        return need(kv=10**9 * batch, workspace=10**9)


def plan(model, prompts: list[list[int]], **options) -> BatchPlan:
    return plan_batch(Sized(model), prompts, [4] * len(prompts), **options)


GIGABYTE = 976_563  # kilobytes


@pytest.mark.parametrize(("gigabytes", "fits"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 8), (40, 9)])
def test_the_largest_batch_is_the_last_that_fits(gigabytes: int, fits: int):
    assert largest_batch(lambda batch: 10**9 * (1 + batch), 9, 10**9 * gigabytes) == fits


def test_without_a_word_as_many_run_together_as_fit_with_room_to_spare(free, tiny_model):
    prompts = [[1] * length for length in (3, 20, 5, 4)]
    free(4 * GIGABYTE)  # 3 fit; with a tenth left free 2 do
    batch_plan = plan(tiny_model, prompts)
    assert (batch_plan.requests, batch_plan.slots, batch_plan.capacity) == (4, 2, 24)
    assert batch_plan.free_bytes == 4 * GIGABYTE * 1024
    assert batch_plan.forecast.kv_bytes == 2 * 10**9
    free(5 * GIGABYTE)  # all fit, to the last byte
    assert plan(tiny_model, prompts).slots == 4
    free(2 * GIGABYTE)  # one does, to the last byte
    assert plan(tiny_model, prompts).slots == 1


def test_more_together_than_fit_is_refused_with_how_many_do(free, tiny_model):
    free(4 * GIGABYTE)
    assert plan(tiny_model, [[1]] * 9, max_batch=3).slots == 3
    with pytest.raises(MemoryForecastError, match=r"6\.00 GB .*; lower max_batch to 3$"):
        plan(tiny_model, [[1]] * 9, max_batch=5)
    free(GIGABYTE)
    for options in ({}, {"max_batch": 5}):
        with pytest.raises(MemoryForecastError, match=r"1\.00 GB .* 2\.00 GB .*; lower prefill_chunk$"):
            plan(tiny_model, [[1]] * 9, **options)


def test_prompts_that_do_not_fit_together_are_decoded_a_few_at_a_time(free, tiny_model):
    """Decided, and said, before the run; the tokens are those of all together."""
    prompts = [[*range(1, 9)], [*range(4, 40)], [5, 6], [*range(30, 50)]]
    with sfi_core.slow_fast(tiny_model, None, CONFIG) as session:
        three = session.forecast(3, 36, 42).needed_bytes
    plans: list[BatchPlan] = []
    options = {"max_new_tokens": 6, "on_plan": plans.append}
    whole = sfi_core.generate(tiny_model, None, prompts, CONFIG, **options)
    free(int(three / 0.9) // 1024 + 1)
    fewer = sfi_core.generate(tiny_model, None, prompts, CONFIG, **options)
    assert [batch_plan.slots for batch_plan in plans] == [whole.slots, fewer.slots] == [4, 3]
    assert [r.token_ids for r in fewer.report.requests] == [r.token_ids for r in whole.report.requests]
    assert fewer.forecast.kv_bytes == plans[1].forecast.kv_bytes == 2 * 128 * 3 * 42


def test_prompts_that_were_read_together_stay_together(tiny_model):
    shared = sfi_core.generation.generate.read_prompt(tiny_model, None, [[1, 2], [3]], capacity=9)
    with pytest.raises(ConfigError, match=r"must be at least the 2 prompts of shared, got 1$"):
        sfi_core.generate(tiny_model, None, [[1, 2], [3]], CONFIG, max_new_tokens=4, shared=shared, max_batch=1)


def test_the_peak_covers_what_was_in_use_and_what_came_and_went():
    size = 64 * 2**20
    memory.reset_peak(CPU)
    before = memory.resident_bytes(CPU)
    block = torch.ones(size, dtype=torch.uint8)
    assert memory.resident_bytes(CPU) >= before + 0.9 * size
    del block
    assert memory.peak_bytes(CPU) >= before + 0.9 * size


def test_resetting_the_peak_forgets_what_came_and_went():
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    del block
    high = memory.peak_bytes(CPU)
    memory.reset_peak(CPU)
    low = memory.peak_bytes(CPU)
    try:
        memory.CLEAR_REFS.write_text("5")
    except OSError:
        pytest.skip("this system does not let a process reset its peak")
    assert low < high


def test_a_peak_that_cannot_be_reset_is_the_process_s(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path)  # writing to a folder is an OSError
    memory.reset_peak(CPU)
    assert memory.peak_bytes(CPU) >= memory.resident_bytes(CPU)


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_without_proc_is_in_the_unit_of_the_system(monkeypatch, tmp_path, platform, unit):
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=4321))
    assert memory.peak_bytes(torch.device("cpu")) == 4321 * unit
