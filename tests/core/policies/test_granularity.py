"""`sfi` that selects whole pages: the rule by hand, and what holds for tokens holds for pages."""

from functools import cache

import pytest
import torch

import sfi_core
from sfi_core import SfiConfig
from sfi_core.engine.batch_pass import allowed_positions
from sfi_core.policies import POLICIES
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.selector import selector
from tests.core.conftest import tiny_qwen3
from tests.fakes import RecordingObserver, layer_context

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SINK, RECENT, BUDGET, PAGE, NEW = 3, 6, 19, 8, 14
PROMPTS = [list(range(10, 90)), [7, 8], list(range(41))]  # ragged; one has nothing to select from
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=2, sink=SINK, recent=RECENT, budget=BUDGET, t_max=4, window_prefill=4,
    trigger_token_ids=tuple(range(0, 96, 5)), page_size=PAGE,
)  # fmt: skip


@cache
def complete(**changes):
    observer = RecordingObserver()
    result = sfi_core.generate(
        tiny_qwen3(), None, PROMPTS, CONFIG.replace(**changes), max_new_tokens=NEW,
        stop_token_ids=(), observers=[observer],
    )  # fmt: skip
    return result.report, observer


def candidates(event) -> range:
    prompt = len(PROMPTS[event.request])
    sink = min(SINK, prompt)
    return range(sink, max(sink, prompt + event.step - RECENT))


def cut_pages(chosen: list[int], allowed: range) -> int:
    """Count the pages of which a selection has some of the positions in J, and lacks others."""
    pages: dict[int, set[bool]] = {}
    for position in allowed:
        pages.setdefault(position // PAGE, set()).add(position in chosen)
    return sum(len(states) > 1 for states in pages.values())


def test_a_page_counts_as_the_mean_of_the_selector_s_scores():
    """Loops and sets over the Selector's scores; J begins and ends within a page."""
    T, stop = 60, 53
    layer = layer_context(
        torch.randn(1, 2, 2, 1, T),
        allowed_BT=allowed_positions(T, torch.tensor([SINK]), torch.tensor([stop])),
        key_norm_BHT=torch.rand(1, 2, T) + 0.5,
    )
    settings = CONFIG.to_dict()["selector"]
    score, _ = selector(layer.logits(), layer.key_norm_BHT, layer.allowed_BT, span=CONFIG.span, **settings)
    policy = POLICIES["sfi"](CONFIG, Trigger(frozenset(), CONFIG))
    for index_K, score_T in zip(policy.select_after(layer).index_BHK[0], score[0], strict=True):
        pages: dict[int, list[int]] = {}
        for position in range(SINK, stop):
            pages.setdefault(position // PAGE, []).append(position)
        expected: list[int] = []
        for page in sorted(pages, key=lambda page: -score_T[pages[page]].exp().mean()):
            expected += pages[page][: BUDGET - len(expected)]
        assert index_K.tolist() == sorted(expected)


def test_a_run_spends_the_budget_on_whole_pages_within_j():
    """As many positions as of tokens; one page at most is cut, the one that the budget ends in."""
    cuts = set()
    for event in complete()[1].selections:
        allowed = candidates(event)
        for index in event.index_HK.tolist():
            chosen = [position for position in index if position >= 0]
            assert len(chosen) == min(BUDGET, len(allowed))
            assert chosen == sorted(set(chosen))
            assert set(chosen) <= set(allowed)
            assert index == chosen + [-1] * (len(index) - len(chosen))
            cuts.add(cut_pages(chosen, allowed))
    assert cuts == {0, 1}


@pytest.mark.parametrize("page_size", [5, 64])
def test_a_budget_of_all_candidates_is_full_attention(page_size: int):
    """Token for token, with anchored recents; a page of 64 holds a whole prompt."""
    full = sfi_core.generate(
        tiny_qwen3(), None, PROMPTS, CONFIG, policy="full-kv", max_new_tokens=NEW, stop_token_ids=()
    ).report
    pages, _ = complete(budget=200, page_size=page_size)
    for ours, dense in zip(pages.requests, full.requests, strict=True):
        assert ours.token_ids == dense.token_ids
        assert ours.fast_steps > 0
