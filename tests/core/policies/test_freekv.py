"""FreeKV's rules (Liu et al., 2025, Sec. 3), each from a run's own keys and queries."""

from functools import cache
from itertools import pairwise

import pytest
import torch

from sfi_core.settings.config import SfiConfig
from tests.covering import first
from tests.watched import LAYERS, H, Seen, Watched, assert_reads_counted, best_of, prompt_of, watched

SINK, RECENT, BUDGET, PAGE, NEW = 2, 5, 10, 4, 12
SOME = 0.3  # a threshold under which some cosines of a random model lie
# 7 tokens are sink and recent ones alone: the first to leave the window is selected by the prompt's query
PROMPTS = [prompt_of(length) for length in (41, 7, 1, 24)]
CONFIG = SfiConfig(slow_start=1, min_gap=0, span=0, sink=SINK, recent=RECENT, budget=BUDGET, trigger_policy="never")


@cache
def run(tau: float, *, first_layer_dense: bool = True) -> Watched:
    settings = {"page": PAGE, "tau": tau, "first_layer_dense": first_layer_dense}
    return watched(PROMPTS, CONFIG.replace(freekv=settings), "freekv", NEW)


def page_score(seen: Seen, head: int) -> list[float]:
    """Softmax over the pages' summaries for each query head, the mean over the group (Sec. 3.2)."""
    D, key = seen.query_HGD.shape[-1], seen.key_HTD[head].double()
    pages = key.split(PAGE)
    means = [0.0] * len(pages)
    for query in seen.query_HGD[head].double():
        bound = []
        for page in pages:
            low, high = page.amin(0), page.amax(0)
            bound.append(sum(max(q * a, q * b) for q, a, b in zip(query.tolist(), low, high, strict=True)))
        softmax = (torch.tensor(bound, dtype=torch.float64) / D**0.5).softmax(0).tolist()
        means = [m + p / len(seen.query_HGD) for m, p in zip(means, softmax, strict=True)]
    return means


def selected(seen: Seen, head: int, tokens: int, sink: int) -> list[int]:
    """Sel(q, K) for a step whose cache holds `tokens`: whole pages, the last one cut short."""
    score = page_score(seen, head)
    by_token = [score[j // PAGE] for j in range(seen.tokens)]
    return best_of(by_token, range(sink, max(sink, tokens - RECENT)), BUDGET)


def moved(now: Seen, last: Seen, head: int, tau: float) -> bool:
    """C_i < tau, pooled over the group (Sec. 3.3)."""
    cosine = torch.cosine_similarity(now.query_HGD[head].double(), last.query_HGD[head].double(), -1)
    return float(cosine.mean()) < tau


def reads(watch: Watched, request: int, layer: int, tau: float):
    """Say what each step's heads read by the rules, and how many of them were corrected, of how many."""
    sink, rows, corrected, of = min(SINK, len(PROMPTS[request])), [], 0, 0
    steps = watch.seen[request, layer]
    for last, now in pairwise(steps):
        heads = []
        for head in range(H):
            moves = moved(now, last, head, tau)
            corrected, of = corrected + moves, of + 1
            chosen = selected(now if moves else last, head, now.tokens, sink)
            recent = range(max(sink, now.tokens - RECENT), now.tokens)
            heads.append([*range(sink), *chosen, *recent])
        rows.append(heads)
    return rows, corrected, of


@pytest.mark.parametrize("request_", range(len(PROMPTS)))
@pytest.mark.parametrize("tau", first([SOME, -1.0, 1.0]))
def test_a_step_reads_the_last_query_s_pages_and_moved_heads_their_own(tau: float, request_: int):
    """Secs. 3.2 and 3.3: the packed positions when the layer attends, and what the attention returned."""
    watch = run(tau, first_layer_dense=False)
    for layer in LAYERS:
        rows, corrected, of = reads(watch, request_, layer, tau)
        share = {-1.0: corrected == 0, 1.0: corrected == of}.get(tau, 0 < corrected < of)
        assert share, (corrected, of)
        for now, heads in zip(watch.seen[request_, layer][1:], rows, strict=True):
            recent = max(min(SINK, len(PROMPTS[request_])), now.tokens - RECENT)
            assert now.packed == [[j for j in positions if j < recent] for positions in heads], now.step
            now.assert_read(heads)


@pytest.mark.parametrize("first_layer_dense", first([True, False]))
def test_reads_are_counted_as_the_positions_say(*, first_layer_dense: bool):
    watch = run(SOME, first_layer_dense=first_layer_dense)
    for request in range(len(PROMPTS)):
        read = {}
        for layer in LAYERS:
            rows, _, _ = reads(watch, request, layer, SOME)
            for now, heads in zip(watch.seen[request, layer][1:], rows, strict=True):
                dense = first_layer_dense and layer == 0
                read[now.step, layer] = [range(now.tokens)] * H if dense else heads
        assert_reads_counted(watch, request, read)


def test_the_first_layer_is_left_dense_unless_it_is_not_to_be():
    """Sec. 5.1."""
    watch = run(SOME)
    for now in watch.seen[0, 0]:
        now.assert_read([range(now.tokens)] * H)
    assert {event.layer for event in watch.observer.selections} == {1}
    assert {event.layer for event in run(SOME, first_layer_dense=False).observer.selections} == {0, 1}


def test_events_say_which_heads_were_corrected_and_what_was_selected_ahead():
    watch = run(SOME)
    steps = watch.seen[0, 1]
    events = {(e.step, e.reason): e for e in watch.observer.selections if e.request == 0}
    later = [(t, reason) for t in range(1, NEW) for reason in ("correction", "speculative")]
    assert sorted(events) == [(0, ""), *later]
    for last, now in pairwise(steps):
        correction = events[now.step, "correction"]
        expected = [moved(now, last, head, SOME) for head in range(H)]
        assert correction.heads_H.tolist() == expected
        ahead = events[now.step, "speculative"].index_HK.tolist()
        assert ahead == [selected(now, head, now.tokens + 1, SINK) for head in range(H)]
