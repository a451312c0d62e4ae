"""The forecast of a lossless run: hand arithmetic, and the tensors that a run really holds."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sfi_core
from sfi_core import EngineOptions, Sampling, SfiConfig
from sfi_core.observers.events import LogitsEvent
from sfi_core.observers.observer import NullObserver, Observer
from sfi_core.settings.config import DraftConfig
from sfi_core.sizes.memory import COMPARING, CPU_SLACK, PICKING, Drafting, forecast
from sfi_core.sizes.policy import untriggered
from sfi_core.state.layer_pages import LayerShape
from tests.core.conftest import tiny_qwen3

VOCABULARY = 40_000
PROMPT, NEW, DRAFT = 40, 10, 6
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=3, recent=6, budget=5, trigger_token_ids=(1,), t_max=100,
    draft=DraftConfig(max_tokens=DRAFT, adaptive=False),
)  # fmt: skip


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive, those of one storage once."""

    def __init__(self) -> None:
        super().__init__()
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {one.data_ptr() for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        for one in tree_leaves(out):
            if torch.is_tensor(one) and one.untyped_storage().nbytes():
                self._see(one, known)
        return out

    def _see(self, one: torch.Tensor, known: set[int]) -> None:
        place, size = one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()
        if not self.users[place]:
            if place in known:
                return  # it was there before
            self.now += size
            self.peak = max(self.peak, self.now)
        self.users[place] += 1
        weakref.finalize(one, self._forget, place, size)

    def _forget(self, place: int, size: int) -> None:
        self.users[place] -= 1
        if not self.users[place]:
            self.now -= size


class Compares(NullObserver):
    def on_logits(self, event: LogitsEvent) -> None:
        """Take note."""


def run(observers: list[Observer], sampling: Sampling | None) -> tuple[int, Any]:
    """Return the most bytes of tensors that a lossless run holds, and its result."""
    model = tiny_qwen3(VOCABULARY)
    torch.manual_seed(1)
    rows = torch.randint(VOCABULARY, (3, PROMPT)).tolist()
    with Live() as live:
        result = sfi_core.generate(
            model, None, rows, CONFIG, max_new_tokens=NEW, stop_token_ids=(), observers=observers,
            engine=EngineOptions(lossless=True), sampling=sampling, seed=3,
        )  # fmt: skip
    return live.peak, result


SAMPLED = Sampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01)


@pytest.mark.parametrize(
    ("observers", "sampling"), [([], None), ([Compares()], SAMPLED)], ids=["alone, greedy", "compared, sampled"]
)
def test_the_forecast_covers_what_a_lossless_run_holds(observers: list[Observer], sampling: Sampling | None):
    """A plain run's forecast does not; and where tokens are drawn, the lossless one is not far above."""
    peak, result = run(observers, sampling)
    assert max(request.lossless.drafted for request in result.report.requests) >= DRAFT
    plain = forecast(
        tiny_qwen3(VOCABULARY), [LayerShape(heads=2, key_width=8, value_width=8, itemsize=4)] * 2,
        untriggered("sfi", CONFIG), batch=3, prompt_tokens=PROMPT, capacity=PROMPT + NEW,
    )  # fmt: skip
    assert plain.needed_bytes < peak <= result.forecast.needed_bytes
    if sampling is not None:  # the forecast knows of no sampling: it leaves room for noise
        assert result.forecast.needed_bytes < 5 * peak


def test_the_bytes_of_a_verification_equal_hand_arithmetic():
    sizes = {"batch": 2, "vocabulary": 1000, "itemsize": 2}
    attention = {"grouped": 2, "capacity": 100}
    one = Drafting(tested=5, together=3000, compares=False, explicit=False)
    assert one.pass_bytes(**sizes, **attention) == 2 * 5 * 1000 * 2 + 3000 * PICKING
    assert one.kept_bytes(**sizes) == 0
    two = Drafting(tested=5, together=10, compares=True, explicit=False)
    assert two.pass_bytes(**sizes, **attention) == 20000 + max(1000 * PICKING, 5000 * COMPARING)
    assert two.kept_bytes(**sizes) == 2 * 4 * 1000 * 2
    long = Drafting(tested=5, together=10, compares=False, explicit=True)
    held = long.pass_bytes(**sizes, grouped=2, capacity=10**6)
    assert held == 3 * 4 * 2 * 5 * 10**6


def test_sliding_windows_are_held_twice(tiny_model: Any):
    sliding = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4, window=10)
    full = LayerShape(heads=2, key_width=8, value_width=8, itemsize=4)
    drafting = Drafting(tested=5, together=10, compares=True, explicit=True)
    plain, lossless = (
        forecast(
            tiny_model,
            [full, sliding],
            untriggered("sfi", CONFIG),
            batch=1,
            prompt_tokens=30,
            capacity=40,
            drafting=one,
        )
        for one in (None, drafting)
    )
    assert lossless.sliding_bytes == 2 * plain.sliding_bytes
    grown = lossless.workspace_bytes - drafting.kept_bytes(batch=1, vocabulary=96, itemsize=4)
    assert grown >= CPU_SLACK * drafting.pass_bytes(batch=1, vocabulary=96, itemsize=4, grouped=2, capacity=40)
