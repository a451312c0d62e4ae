"""What each baseline chooses, against its definition written anew (landscape: the papers' own)."""

import math
from dataclasses import replace

import pytest
import torch

import sfi_core
from sfi_core.engine.batch_pass import allowed_positions
from sfi_core.policies import POLICIES, LayerContext, Policy
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_kernels.page_scan import page_scan
from sfi_kernels.step_descriptor import FAST, StepRequest, describe_step
from tests.fakes import RecordingObserver, layer_context
from tests.watched import best_of

H, G, D = 2, 2, 8
SINK, RECENT, BUDGET, PROMPT = 2, 4, 6, 40
CONFIG = SfiConfig(slow_start=1, min_gap=0, span=0, sink=SINK, recent=RECENT, budget=BUDGET, trigger_policy="never")


def make(policy: str, config: SfiConfig = CONFIG, layers: tuple[int, ...] = (0, 1)) -> Policy:
    return POLICIES[policy](config, Trigger(frozenset(), config), layers)


def shown(logits: torch.Tensor, **fields) -> LayerContext:
    """Return what a layer of one request shows a policy at a step whose cache holds T tokens."""
    T = logits.shape[-1]
    state = fields.pop("state", None) or RequestState(
        prompt_tokens=PROMPT, length=T, recent_start=max(SINK, T - RECENT), step=T - PROMPT
    )
    return layer_context(
        logits, allowed_BT=allowed_positions(T, torch.tensor([SINK]), torch.tensor([state.recent_start])),
        key_norm_BHT=fields.pop("norms", torch.ones(1, H, T)), states=(state,), **fields,
    )  # fmt: skip


def random_logits(length: int, window: int = 1, seed: int = 0) -> torch.Tensor:
    """Causal: window query w sees all but the last `window - 1 - w` positions."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, H, G, window, length, generator=generator)
    for w in range(window):
        logits[..., w, length - window + w + 1 :] = -torch.inf
    return logits


def chosen(index_BHK: torch.Tensor) -> list[list[int]]:
    return [[j for j in head if j >= 0] for head in index_BHK[0].tolist()]


def test_snapkv_keeps_the_pooled_attention_of_the_window():
    """Softmax over the whole prompt, mean over window and group, average over five neighbors."""
    logits = random_logits(PROMPT, window=3)
    selected = chosen(make("snapkv").select_after(shown(logits)).index_BHK)
    prefix = range(SINK, PROMPT - RECENT)
    mean = logits.double().softmax(-1).mean(dim=(2, 3))[0]
    for head in range(H):
        score = [sum(float(mean[head, k]) for k in range(j - 2, j + 3) if k in prefix) / 5 for j in range(PROMPT)]
        assert selected[head] == best_of(score, prefix, BUDGET)


def test_snapkv_selects_once_and_keeps_what_it_decodes(tiny_model):
    observer = RecordingObserver()
    config = CONFIG.replace(trigger_policy="always")  # not asked
    sfi_core.generate(
        tiny_model, None, [list(range(PROMPT))], config, policy="snapkv",
        max_new_tokens=12, stop_token_ids=(), observers=[observer],
    )  # fmt: skip
    assert {event.step for event in observer.selections} == {0}
    attended = [event.attended_tokens for event in observer.steps[1:]]
    assert attended == [SINK + BUDGET + RECENT + step for step in range(1, 12)]


@pytest.mark.parametrize("length", [37, 48, 64])
def test_quest_takes_the_pages_with_the_highest_scores(length: int):
    """Sum over channels of max(q min, q max); the largest over a KV head's queries."""
    page, budget, generator = 4, 12, torch.Generator().manual_seed(length)
    key_PHND = torch.randn(8, H, 8, D, generator=generator)
    query_BHGD = torch.randn(1, H, G, D, generator=generator)
    key_HTD, policy = key_PHND.transpose(0, 1).flatten(1, 2), make("quest", CONFIG.replace(baseline={"page": page}))
    kept = policy.keeps(1, G, key_PHND, key_PHND, 64)
    # what a prompt's end leaves: all tokens but the step's own
    state = RequestState(length=length - 1, prompt_tokens=length - 1)
    keys = shown(
        torch.zeros(1, H, G, 1, length - 1), state=state, kept=(kept,), keys=lambda *at: key_HTD[None, :, at[1] : at[2]]
    )
    policy.select_after(keys)
    step = StepRequest(mode=FAST, length=length, recent_start=length - RECENT, packed=0, sink=SINK)
    index_BHK = page_scan(
        query_BHGD, key_PHND, torch.arange(8)[None].int(), describe_step([step], 0, torch.device("cpu")), kept.pages,
        torch.zeros(1, H, SINK + budget, dtype=torch.int32), torch.zeros(1, H, dtype=torch.int32), page=page,
        budget=budget,
    ).index_BHK  # fmt: skip
    selected = chosen(index_BHK)
    for head in range(H):
        score = []
        for j in range(length):
            page_PD = key_HTD[head, j - j % page : min(length, j - j % page + page)]
            q_GD = query_BHGD[0, head]
            of_page = torch.maximum(q_GD * page_PD.amin(0), q_GD * page_PD.amax(0)).sum(-1)
            score.append(float(of_page.max()))
        assert selected[head] == best_of(score, range(SINK, length - RECENT), budget)


def run(model, policy: str, config: SfiConfig = CONFIG, **options):
    return sfi_core.generate(
        model, None, [list(range(PROMPT))], config, policy=policy, max_new_tokens=12, stop_token_ids=(), **options
    ).report


def test_random_k_draws_differ_between_steps_layers_texts_and_seeds():
    layer = shown(random_logits(PROMPT))
    state = layer.states[0]
    others = [replace(state, step=7, tokens=text) for text in ([], [1] * 7, [2] * 7)]
    draws = {
        str(chosen(make("random-k", CONFIG.replace(trigger_seed=seed)).select_after(evidence).index_BHK))
        for seed in (0, 1)
        for evidence in (layer, replace(layer, layer=1), *(replace(layer, states=(other,)) for other in others))
    }
    assert len(draws) == 2 * (2 + len(others))


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
    selected = chosen(make("prior-only").select_after(layer).index_BHK)
    s, first, last = CONFIG.selector, SINK, PROMPT - RECENT - 1
    for head in range(H):
        score = []
        for j, norm in enumerate(norms[0, head].tolist()):
            u = min(1.0, max(0.0, (j - first) / (last - first)))
            decay = math.exp(-s.beta * u**s.power) * (1 - u + 1e-12) ** s.eta
            score.append(norm**-s.gamma * decay)
        assert selected[head] == best_of(score, range(first, last + 1), BUDGET)


def test_quest_and_the_oracle_say_what_choosing_reads(tiny_model):
    """A page bound is two vectors, as a token's key and value; the oracle reads every key."""
    for policy, share in (("quest", 1 / 16), ("oracle-top-k", 1 / 2), ("sfi", 0)):
        request = run(tiny_model, policy).requests[0]
        assert request.selection_ratio == pytest.approx(share)
        assert request.stored_ratio == 1
        half = run(tiny_model, policy, CONFIG.replace(dense_layers=(0,))).requests[0]  # nothing is chosen there
        assert half.selection_ratio == pytest.approx(share / 2)
        assert half.cache_read_ratio == half.read_ratio + half.selection_ratio


def test_a_method_that_evicts_stores_what_it_reads(tiny_model):
    for policy in ("snapkv", "streaming-llm"):
        request = run(tiny_model, policy).requests[0]
        assert request.stored_ratio == request.read_ratio < 0.5
