"""What CUDA graphs and lossless runs hold, by hand and measured; free memory as PyTorch's allocator knows it."""

import weakref
from collections import Counter
from fractions import Fraction

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sfi_core
from sfi_core import EngineOptions, Sampling, SfiConfig
from sfi_core.errors import MemoryForecastError
from sfi_core.generation import batch_plan
from sfi_core.machine import memory
from sfi_core.measure.bench.architectures import empty_model, random_config
from sfi_core.measure.bench.byte_roofline import forecast_document
from sfi_core.measure.bench.settings import DecodeSettings
from sfi_core.observers.observer import NullObserver, Observer
from sfi_core.settings.config import DraftConfig
from sfi_core.sizes import memory as needs
from sfi_core.sizes.policy import untriggered
from sfi_core.state.layer_pages import LayerShape
from sfi_core.state.side_stream import RING_PLACES
from tests.core.conftest import tiny_qwen3
from tests.covering import first

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
FULL = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4)
CONFIG = SfiConfig(sink=3, recent=6, budget=5, trigger_token_ids=(1,))
SFI, FULL_KV = (untriggered(name, CONFIG) for name in ("sfi", "full-kv"))


def test_there_is_a_graph_for_each_power_of_two_of_slow_requests():
    assert needs.step_sizes(1, selects=True) == [0, 1]
    assert needs.step_sizes(6, selects=True) == [0, 1, 2, 4, 6]
    assert needs.step_sizes(8, selects=True) == [0, 1, 2, 4, 8]
    assert needs.step_sizes(8, selects=False) == [0]


def test_the_bytes_of_graphs_equal_hand_arithmetic(tiny_model):
    """4 query heads over 2 KV heads, a vocabulary of 96, in float32; a batch of 3 has graphs 0, 1, 2, 3."""
    sizes = {"batch": 3, "prompt_tokens": 30, "capacity": 1000, "prefill_chunk": 8}
    options = {"refreshed_together": 3, "evidence_buffers": RING_PLACES}
    whole, none = (
        needs.forecast(tiny_model, [FULL] * 2, SFI, graphs=graphs, **sizes, **options) for graphs in (True, False)
    )
    selector = (RING_PLACES * 4 + 12 * 2) * 3 * 1000 * 4
    pass_over_a_token = 1408 * 3 + 768 * 3
    logits, chosen = 3 * 96 * 4, (0 + 1 + 2 + 3) * 2 * 2 * 5 * 4
    assert whole.graph_bytes == (
        selector + pass_over_a_token + logits + chosen + 4 * needs.GRAPH_BYTES + needs.LIBRARY_BYTES
    )
    # verifications of 2, 3 and 4 tokens beside those of one: their logits as well, and where all graphs leave them
    drafting = needs.Drafting(tested=4, together=1, compares=False, explicit=False)
    drafts = needs.forecast(tiny_model, [FULL] * 2, SFI, graphs=True, drafting=drafting, **sizes, **options)
    passed = 1408 * 3 * 4 + 768 * 3 + (4 + 3) * logits
    assert drafts.graph_bytes == selector + passed + 4 * (chosen + 4 * needs.GRAPH_BYTES) + needs.LIBRARY_BYTES
    assert none.graph_bytes == 0
    assert whole.needed_bytes - none.needed_bytes == whole.graph_bytes
    assert whole.workspace_bytes == none.workspace_bytes == needs.CPU_SLACK * (4 * 4 * 16 + 24) * 4000


def test_a_policy_that_selects_nothing_has_one_graph_without_a_ring(tiny_model):
    forecast = needs.forecast(tiny_model, [FULL], FULL_KV, batch=3, prompt_tokens=30, capacity=1000, graphs=True)
    step = 1408 * 3 + 768 * 3
    assert forecast.graph_bytes == step + 3 * 96 * 4 + needs.GRAPH_BYTES + needs.LIBRARY_BYTES


@pytest.mark.parametrize(
    ("engine", "places", "graphs"),
    [
        (EngineOptions(), RING_PLACES, True),
        (EngineOptions(overlap=False), 1, True),
        (EngineOptions(graphs=False), RING_PLACES, False),
    ],
)
def test_a_bench_s_forecast_counts_the_evidence_ring_and_the_graphs(monkeypatch, engine, places, graphs):
    """4 x rows x H x G x capacity x 4 bytes; Qwen3-4B has 8 KV heads, 32 query heads, 151,936 tokens."""
    monkeypatch.setattr("sfi_core.measure.bench.byte_roofline.describe_measured", lambda _: {})
    model = empty_model(random_config("qwen3-4b"), torch.device("meta"), torch.bfloat16)
    asked = DecodeSettings(
        policies=("sfi",), contexts=(16384,), batches=(16,), slow_rate=Fraction(1, 20), engine=engine
    )
    document = forecast_document(model, asked, CUDA, bandwidth_gb_per_s=1, memory_bytes=1e12)
    capacity = asked.capacity(16384)
    selector = (places * 32 + 12 * 8) * 16 * capacity * 4
    logits = 2 * 151936 * 4 * 16
    widest = (3 * 2560 + 4 * 9728) * 2
    kept_bytes = 16 * 151936 * 2 + (0 + 1 + 2 + 4 + 8 + 16) * 36 * 8 * 2048 * 4
    held = selector + widest * 16 + logits + kept_bytes + 6 * needs.GRAPH_BYTES + needs.LIBRARY_BYTES
    # a prompt selects by 16 queries
    workspace = max(selector, (4 * 32 * 16 + 12 * 8) * capacity * 4)
    assert document["rows"][0]["workspace_bytes"] == workspace + (held if graphs else 0)


class Allocator:
    """PyTorch's allocator over a device of some bytes: what is freed stays reserved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, total: int) -> None:
        self.total, self.reserved, self.allocated, self.emptied = total, 0, 0, 0
        for name, function in {
            "mem_get_info": lambda _: (self.total - self.reserved, self.total),
            "memory_reserved": lambda _: self.reserved,
            "memory_allocated": lambda _: self.allocated,
            "empty_cache": self._empty,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def take(self, size: int) -> None:
        self.allocated += size
        self.reserved = max(self.reserved, self.allocated)

    def _empty(self) -> None:
        self.emptied += 1
        self.reserved = self.allocated


def test_what_the_allocator_keeps_unused_is_free(monkeypatch: pytest.MonkeyPatch):
    allocator = Allocator(monkeypatch, 1000)
    assert memory.free_bytes(CUDA) == 1000
    allocator.take(700)
    assert memory.free_bytes(CUDA) == 300
    allocator.allocated = 100
    assert memory.free_bytes(CUDA) == 900
    memory.give_back(CPU)
    assert (allocator.emptied, allocator.reserved) == (0, 700)
    memory.give_back(CUDA)
    assert (allocator.emptied, allocator.reserved) == (1, 100)
    assert memory.free_bytes(CUDA) == 900


@pytest.mark.parametrize("empties", [True, False])
def test_a_second_run_of_a_process_is_planned_as_the_first(monkeypatch: pytest.MonkeyPatch, tiny_model, empties: bool):
    """Of four prompts three fit; the first run's memory is free again, whether or not it was given back."""
    prompts = [[*range(1, 9)], [*range(4, 40)], [5, 6], [*range(30, 50)]]
    with sfi_core.slow_fast(tiny_model, None, CONFIG) as session:
        three = session.forecast(3, 36, 42).needed_bytes
    allocator, plans, free = Allocator(monkeypatch, int(three / 0.9) + 1), [], memory.free_bytes
    monkeypatch.setattr(batch_plan, "free_bytes", lambda _: free(CUDA))
    monkeypatch.setattr(batch_plan, "give_back", lambda _: memory.give_back(CUDA) if empties else None)

    def planned(plan) -> None:
        plans.append(plan)
        allocator.take(plan.forecast.needed_bytes)

    for _ in range(2):
        sfi_core.generate(tiny_model, None, prompts, CONFIG, max_new_tokens=6, on_plan=planned)
        allocator.allocated = 0
    first, second = plans
    assert (first.slots, first.free_bytes) == (second.slots, second.free_bytes)
    assert first.slots == 3
    assert allocator.emptied == (2 if empties else 0)


def test_a_refusal_says_what_graphs_would_hold(monkeypatch: pytest.MonkeyPatch, tiny_model):
    monkeypatch.setattr("sfi_core.sizes.memory.free_bytes", lambda _: 1000)
    sizes = {"batch": 1, "prompt_tokens": 3, "capacity": 9}
    for graphs, words in ((True, "0.05 GB CUDA graphs"), (False, "GB workspace)")):
        expected = needs.forecast(tiny_model, [FULL], FULL_KV, graphs=graphs, **sizes)
        with pytest.raises(MemoryForecastError) as caught:
            needs.check_fits(expected, CPU)
        assert words in str(caught.value)


VOCABULARY = 40_000
PROMPT, NEW, DRAFT = 40, 10, 6
DRAFTING = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=3, recent=6, budget=5, trigger_token_ids=(1,), t_max=100,
    draft=DraftConfig(max_tokens=DRAFT, adaptive=False),
)  # fmt: skip


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, those of one storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf) and leaf.untyped_storage().nbytes():
                self._see(leaf, known)
        return out

    def _see(self, tensor: torch.Tensor, known: set[int]) -> None:
        place, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        if not self.users[place]:
            if place in known:
                return  # it was there before
            self.now += size
            self.peak = max(self.peak, self.now)
        self.users[place] += 1
        weakref.finalize(tensor, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.users[place] -= 1
        if not self.users[place]:
            self.now -= size


class Compares(NullObserver):
    def on_logits(self, event) -> None:
        """Take note."""


def run(observers: list[Observer], sampling: Sampling | None):
    model = tiny_qwen3(VOCABULARY)
    torch.manual_seed(1)
    rows = torch.randint(VOCABULARY, (3, PROMPT)).tolist()
    with Live() as live:
        result = sfi_core.generate(
            model, None, rows, DRAFTING, max_new_tokens=NEW, stop_token_ids=(), observers=observers,
            engine=EngineOptions(lossless=True), sampling=sampling, seed=3,
        )  # fmt: skip
    return live.peak, result


SAMPLED = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)


@pytest.mark.parametrize(
    ("observers", "sampling"), first([([], None), ([Compares()], SAMPLED)]), ids=["alone, greedy", "compared, sampled"]
)
def test_the_forecast_covers_what_a_lossless_run_holds(observers: list[Observer], sampling: Sampling | None):
    """A plain run's forecast does not; and where tokens are drawn, the lossless one is not far above."""
    peak, result = run(observers, sampling)
    assert max(request.lossless.drafted for request in result.report.requests) >= DRAFT
    plain = needs.forecast(
        tiny_qwen3(VOCABULARY), [LayerShape(heads=2, key_width=8, value_width=8, itemsize=4)] * 2,
        untriggered("sfi", DRAFTING), batch=3, prompt_tokens=PROMPT, capacity=PROMPT + NEW,
    )  # fmt: skip
    assert plain.needed_bytes < peak <= result.forecast.needed_bytes
    if sampling is not None:  # the forecast knows of no sampling: it leaves room for noise
        assert result.forecast.needed_bytes < 5 * peak


def test_the_bytes_of_a_verification_equal_hand_arithmetic():
    sizes = {"batch": 2, "vocabulary": 1000, "itemsize": 2}
    attention = {"grouped": 2, "capacity": 100}
    plain = needs.Drafting(tested=5, together=3000, compares=False, explicit=False)
    assert plain.pass_bytes(**sizes, **attention) == 2 * 5 * 1000 * 2 + 3000 * needs.PICKING
    assert plain.kept_bytes(**sizes) == 0
    two = needs.Drafting(tested=5, together=10, compares=True, explicit=False)
    assert two.pass_bytes(**sizes, **attention) == 20000 + max(1000 * needs.PICKING, 5000 * needs.COMPARING)
    assert two.kept_bytes(**sizes) == 2 * 4 * 1000 * 2
    long = needs.Drafting(tested=5, together=10, compares=False, explicit=True)
    held = long.pass_bytes(**sizes, grouped=2, capacity=10**6)
    assert held == 3 * 4 * 2 * 5 * 10**6


def test_states_are_held_twice_and_rings_have_room_for_a_draft(tiny_model):
    sliding = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4, window=61, state_bytes=100)
    full = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4)
    drafting = needs.Drafting(tested=5, together=10, compares=True, explicit=True)
    plain, lossless = (
        needs.forecast(
            tiny_model,
            [full, sliding],
            untriggered("sfi", DRAFTING),
            batch=1,
            prompt_tokens=30,
            capacity=400,
            drafting=draft,
        )
        for draft in (None, drafting)
    )
    row = 128 + 2 * 4
    assert (plain.sliding_bytes, lossless.sliding_bytes) == (64 * row + 100, 128 * row + 200)
    grown = lossless.workspace_bytes - drafting.kept_bytes(batch=1, vocabulary=96, itemsize=4)
    assert grown >= needs.CPU_SLACK * drafting.pass_bytes(batch=1, vocabulary=96, itemsize=4, grouped=2, capacity=400)
