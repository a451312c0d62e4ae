"""What each baseline chooses, against its definition written anew (landscape: the papers' own)."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import sfi_core
from sfi_core.errors import ConfigError
from sfi_core.policies import POLICIES, LayerContext, Policy
from sfi_core.settings.config import SfiConfig
from sfi_core.state.position_sets import allowed_positions
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from tests.fakes import RecordingObserver, layer_context

H, G, D = 2, 2, 8
SINK, RECENT, BUDGET, PROMPT = 2, 4, 6, 40
CONFIG = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=SINK, recent=RECENT, budget=BUDGET, trigger_policy="never"
)


def make(policy: str, config: SfiConfig = CONFIG, layers: tuple[int, ...] = (0, 1)) -> Policy:
    return POLICIES[policy](config, Trigger(frozenset(), config), layers)


def shown(logits: torch.Tensor, **fields: Any) -> LayerContext:
    """Return what a layer of one request shows a policy at a step whose cache holds T tokens."""
    T = logits.shape[-1]
    state = fields.pop("state", None) or RequestState(
        prompt_tokens=PROMPT, length=T, recent_start=max(SINK, T - RECENT), step=T - PROMPT
    )
    return layer_context(
        logits,
        allowed_BT=allowed_positions(T, torch.tensor([SINK]), torch.tensor([state.recent_start])),
        key_norm_BHT=fields.pop("norms", torch.ones(1, H, T)),
        states=(state,),
        **fields,
    )


def random_logits(length: int, window: int = 1, seed: int = 0) -> torch.Tensor:
    """Causal: window query w sees all but the last `window - 1 - w` positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, H, G, window, length, generator=generator)
    for w in range(window):
        logits[..., w, length - window + w + 1 :] = -torch.inf
    return logits


def chosen(index_BHK: torch.Tensor) -> list[list[int]]:
    return [[j for j in head if j >= 0] for head in index_BHK[0].tolist()]


def best_of(score: list[float], candidates: range, budget: int = BUDGET) -> list[int]:
    return sorted(sorted(candidates, key=lambda j: (-score[j], j))[:budget])


# snapkv -------------------------------------------------------------------------------------------


def test_snapkv_keeps_the_pooled_attention_of_the_window():
    """Softmax over the whole prompt, mean over window and group, average over five neighbors."""
    logits = random_logits(PROMPT, window=3)
    got = chosen(make("snapkv").select_after(shown(logits)).index_BHK)
    prefix = range(SINK, PROMPT - RECENT)
    mean = logits.double().softmax(-1).mean(dim=(2, 3))[0]
    for head in range(H):
        score = [
            sum(float(mean[head, k]) for k in range(j - 2, j + 3) if k in prefix) / 5
            for j in range(PROMPT)
        ]
        assert got[head] == best_of(score, prefix)


def test_snapkv_selects_once_and_keeps_what_it_decodes(tiny_model: Any):
    observer = RecordingObserver()
    config = CONFIG.replace(trigger_policy="always")  # not asked
    sfi_core.generate(
        tiny_model, None, [list(range(PROMPT))], config, policy="snapkv",
        max_new_tokens=12, stop_token_ids=(), observers=[observer],
    )  # fmt: skip
    assert {event.step for event in observer.selections} == {0}
    attended = [event.attended_tokens for event in observer.steps[1:]]
    assert attended == [SINK + BUDGET + RECENT + step for step in range(1, 12)]


# h2o and tova -------------------------------------------------------------------------------------


def drive(policy: str, steps: int) -> list[tuple[list[list[int]], torch.Tensor]]:
    """Run a policy over made-up logits; return each step's selection and those logits."""
    method, note = make(policy), {}
    prompt = random_logits(PROMPT, window=PROMPT)
    if method.observes_prompt:
        for start in (0, 16):  # in two blocks
            stop = 16 if start == 0 else PROMPT
            block = prompt[..., start:stop, :stop]
            method.observe_prompt(shown(block, notes=(note,)))
    first = method.select_after(shown(prompt[..., -1:, :], notes=(note,)))
    rows = [(chosen(first.index_BHK), prompt)]
    for step in range(1, steps):
        T = PROMPT + step
        logits = random_logits(T, seed=step)
        selection = method.select_before(shown(logits, notes=(note,)))
        got = chosen(selection.index_BHK)
        positions = [[*range(SINK), *head, *range(T - RECENT, T)] for head in got]
        position_HS = torch.tensor(positions)
        attended_HGS = logits[0, :, :, 0].gather(2, position_HS[:, None].expand(-1, G, -1))
        method.observe_fast(
            shown(logits, notes=(note,), attended=lambda _, a=attended_HGS, p=position_HS: (a, p))
        )
        rows.append((got, logits))
    return rows


def test_h2o_keeps_the_largest_sums_of_attention_and_forgets_the_rest_for_good():
    """Sums over every query of the prompt and of each step over what it read, by KV head."""
    rows = drive("h2o", 15)
    score = [[0.0] * 100 for _ in range(H)]
    for head in range(H):
        column = rows[0][1].double().softmax(-1)[0, head].sum(dim=(0, 1)).tolist()
        score[head][:PROMPT] = column
    kept = [best_of(score[h], range(SINK, PROMPT - RECENT)) for h in range(H)]
    assert rows[0][0] == kept
    for step, (got, logits) in enumerate(rows[1:], 1):
        T = PROMPT + step
        for head in range(H):
            pool = [*kept[head], T - RECENT - 1]
            kept[head] = sorted(sorted(pool, key=lambda j: (score[head][j], j))[1:])
            read = [*range(SINK), *kept[head], *range(T - RECENT, T)]
            probability = logits[0, head, :, 0][:, read].double().softmax(-1).sum(0)
            for j, p in zip(read, probability.tolist(), strict=True):
                score[head][j] += p
        assert got == kept, step


def test_tova_drops_what_the_last_query_attended_least_over_all_heads():
    rows = drive("tova", 15)
    mean = rows[0][1][..., -1, :].double().softmax(-1).mean(dim=(0, 1, 2)).tolist()
    kept = best_of(mean, range(SINK, PROMPT - RECENT))
    assert rows[0][0] == [kept] * H
    for step, (got, logits) in enumerate(rows[1:], 1):
        T = PROMPT + step
        pool = [*kept, T - RECENT - 1]
        kept = sorted(sorted(pool, key=lambda j: (mean[j], j))[1:])
        assert got == [kept] * H, step
        read = [*range(SINK), *kept, *range(T - RECENT, T)]
        probability = logits[0, :, :, 0][:, :, read].double().softmax(-1).mean(dim=(0, 1))
        mean = [0.0] * T
        for j, p in zip(read, probability.tolist(), strict=True):
            mean[j] = p


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_an_evicted_position_never_comes_back(policy: str):
    gone: set[int] = set()
    for step, (got, _) in enumerate(drive(policy, 30)):
        now = set(got[0])
        assert not now & gone
        gone = set(range(SINK, PROMPT + step - RECENT)) - now


# quest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [37, 48, 64])
def test_quest_takes_the_pages_with_the_highest_bounds(length: int):
    """Sum over channels of max(q min, q max), the largest over a KV head's queries."""
    page, budget = 4, 12
    config = CONFIG.replace(budget=budget, baseline={"page": page})
    generator = torch.Generator().manual_seed(length)
    key = torch.randn(1, H, length, D, generator=generator)
    query = torch.randn(1, H, G, 1, D, generator=generator)
    state = RequestState(length=length, recent_start=length - RECENT, prompt_tokens=9, step=1)
    layer = shown(
        torch.zeros(1, H, G, 1, length), state=state, query_BHGWD=query, notes=({},),
        keys=lambda _, start, stop: key[:, :, start:stop],
    )  # fmt: skip
    got = chosen(make("quest", config).select_before(layer).index_BHK)
    for head in range(H):
        score = []
        for j in range(length):
            own = key[0, head, j - j % page : min(length, j - j % page + page)]
            low, high = own.amin(0), own.amax(0)
            bounds = torch.maximum(query[0, head, :, 0] * low, query[0, head, :, 0] * high).sum(-1)
            score.append(float(bounds.max()))
        assert got[head] == best_of(score, range(SINK, length - RECENT), budget)


def test_quest_looks_at_a_full_page_once():
    """Page bounds are kept; a step reads the keys of what is new."""
    config, asked = CONFIG.replace(baseline={"page": 8}), []
    note: dict[str, Any] = {}
    for length in (30, 31, 32, 33):
        key = torch.randn(1, H, length, D)

        def keys(_: int, start: int, stop: int, key: torch.Tensor = key) -> torch.Tensor:
            asked.append((start, stop))
            return key[:, :, start:stop]

        query = torch.ones(1, H, G, 1, D)
        logits = torch.zeros(1, H, G, 1, length)
        layer = shown(logits, query_BHGWD=query, notes=(note,), keys=keys)
        make("quest", config).select_before(layer)
    assert asked == [(0, 24), (24, 30), (24, 31), (24, 32), (32, 33)]


def test_quest_and_the_oracle_say_what_choosing_reads(tiny_model: Any):
    """A page bound is two vectors, as a token's key and value; the oracle reads every key."""
    for policy, share in (("quest", 1 / 16), ("oracle-top-k", 1 / 2), ("sfi", 0)):
        request = run(tiny_model, policy).requests[0]
        assert request.selection_ratio == pytest.approx(share)
        assert request.stored_ratio == 1


def test_a_method_that_evicts_stores_what_it_reads(tiny_model: Any):
    for policy in ("h2o", "tova", "snapkv", "streaming-llm"):
        request = run(tiny_model, policy).requests[0]
        assert request.stored_ratio == request.read_ratio < 0.5


def run(model: Any, policy: str, config: SfiConfig = CONFIG, **options: Any) -> Any:
    return sfi_core.generate(
        model, None, [list(range(PROMPT))], config, policy=policy, max_new_tokens=12,
        stop_token_ids=(), **options,
    ).report  # fmt: skip


# tidaldecode --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "asked", "chooses", "dense"),
    [
        (tuple(range(32)), None, (2, 13), (0, 1, 2, 13)),
        (tuple(range(36)), None, (2, 15), (0, 1, 2, 15)),
        (tuple(range(1, 26, 2)), None, (5, 11), (1, 3, 5, 11)),  # every other layer slides
        ((0, 1, 2, 3), None, (2,), (0, 1, 2)),
        ((0, 1), None, (0,), (0,)),
        ((0, 1, 2, 3), (1,), (1,), (0, 1)),
    ],
)
def test_tidaldecode_s_layers(layers: Any, asked: Any, chooses: Any, dense: Any):
    method = make("tidaldecode", CONFIG.replace(baseline={"select_layers": asked}), layers)
    assert (method.chooses, method.config.dense_layers) == (chooses, dense)
    assert [layer for layer in layers if method.selects_in(layer)] == list(chooses)


def test_tidaldecode_refuses_a_layer_that_the_model_does_not_have():
    with pytest.raises(ConfigError) as caught:
        make("tidaldecode", CONFIG.replace(baseline={"select_layers": [1, 7]}))
    assert str(caught.value) == "select_layers must be among [0, 1], got [7]"


def test_tidaldecode_hands_one_layer_s_top_k_to_the_next():
    method, shared = make("tidaldecode"), {}
    logits = random_logits(PROMPT)
    assert method.select_after(shown(logits, shared=(shared,))) is None
    later = shown(random_logits(PROMPT, seed=1), layer=1, shared=(shared,))
    got = chosen(method.select_before(later).index_BHK)
    within = logits.double()[..., SINK : PROMPT - RECENT].softmax(-1).mean(dim=(2, 3))[0]
    for head in range(H):
        score = [0.0] * SINK + within[head].tolist()
        assert got[head] == best_of(score, range(SINK, PROMPT - RECENT))


def test_tidaldecode_reads_its_choosing_layers_whole(tiny_model: Any):
    report = run(tiny_model, "tidaldecode")
    sparse = SINK + BUDGET + RECENT
    expected = [(PROMPT + step + sparse) / 2 for step in range(1, 12)]  # one of two layers
    assert report.requests[0].mean_attended_tokens == pytest.approx(sum(expected) / 11)


# controls -----------------------------------------------------------------------------------------


def test_random_k_draws_differ_between_steps_layers_and_seeds():
    layer = shown(random_logits(PROMPT))
    state = layer.states[0]
    draws = {
        str(chosen(make("random-k", CONFIG.replace(trigger_seed=seed)).select_after(one).index_BHK))
        for seed in (0, 1)
        for one in (
            layer,
            replace(layer, layer=1),
            replace(layer, states=(replace(state, step=7),)),
        )
    }
    assert len(draws) == 6


def test_random_k_is_uniform_over_the_candidates():
    counts = torch.zeros(PROMPT)
    for seed in range(300):
        layer = shown(random_logits(PROMPT))
        index = make("random-k", CONFIG.replace(trigger_seed=seed)).select_after(layer).index_BHK
        counts += torch.bincount(index[0].flatten(), minlength=PROMPT)
    inside = counts[SINK : PROMPT - RECENT]
    expected = 300 * H * BUDGET / len(inside)
    assert counts.sum() == inside.sum()
    assert bool(((inside - expected).abs() < 5 * expected**0.5).all())


def test_prior_only_ranks_by_key_norm_and_position():
    """Eqs. 9-12 in plain Python."""
    norms = 0.5 + torch.rand(1, H, PROMPT)
    layer = shown(random_logits(PROMPT), norms=norms)
    got = chosen(make("prior-only").select_after(layer).index_BHK)
    s, first, last = CONFIG.selector, SINK, PROMPT - RECENT - 1
    for head in range(H):
        score = []
        for j, norm in enumerate(norms[0, head].tolist()):
            u = min(1.0, max(0.0, (j - first) / (last - first)))
            decay = math.exp(-s.beta * u**s.power) * (1 - u + 1e-12) ** s.eta
            score.append(norm**-s.gamma * decay)
        assert got[head] == best_of(score, range(first, last + 1))
