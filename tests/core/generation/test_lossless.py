"""Lossless runs give full attention's tokens, whatever drafts them, and tell observers and callers so."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from sfi_core import Sampling, SfiConfig, generate
from sfi_core.engine import loop
from sfi_core.engine.layer import Layer
from sfi_core.engine.lossless import DraftRule, Drafts
from sfi_core.errors import ConfigError
from sfi_core.hosts.transformers import decoder
from sfi_core.settings.engine import DEFAULTS, EngineOptions
from sfi_core.state.request import RequestState
from sfi_kernels.code_scan.reference import words_of
from sfi_kernels.page_scan import summarize
from tests.architectures import COMMON, WORKS, prompts, tiny
from tests.covering import covering, each_value, first
from tests.fakes import RecordingObserver, tokens
from tests.two_tier import norms_of

pytestmark = pytest.mark.seam

SMALL = SfiConfig(
    sink=2, recent=6, budget=5, t_max=8, min_gap=0, span=0, window_prefill=8, trigger_token_ids=tuple(range(0, 300, 6))
)
ROWS = prompts(9, 37, 24)
STEPS = 20
DRAFTS = {
    "1": {"max_tokens": 1, "adaptive": False},
    "4": {"max_tokens": 4, "adaptive": False},
    "to the boundary": {"adaptive": False},
    "adaptive": {},
}
DRAFTERS = ("sfi", "codescan", "quest", "streaming-llm", "snapkv")
LABELS = [architecture.label for architecture in WORKS]
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.8),
    "processed": Sampling(top_k=20, top_p=0.9, repetition_penalty=1.3),
}


def run(label, rows, *, policy="sfi", draft="to the boundary", **options):
    config = options.pop("config", SMALL).replace(draft=DRAFTS[draft])
    engine = replace(options.pop("engine", DEFAULTS), lossless=options.pop("lossless", True))
    settings = {"stop_token_ids": (), "max_new_tokens": STEPS, "engine": engine, **options}
    return generate(tiny(label), None, rows, config, policy=policy, **settings)


@cache
def full(label, sampling="greedy"):
    """Full attention's tokens, and those of each request where it is decoded alone."""
    result = run(label, ROWS, policy="full-kv", sampling=SAMPLINGS[sampling], seed=5, lossless=False)
    return tokens(result)


WAYS = [way.values for way in covering(DRAFTERS, DRAFTS, SAMPLINGS)]  # every pair


@pytest.mark.parametrize(("label", "way"), first(each_value(LABELS, WAYS), 8), ids=str)
def test_tokens_are_those_of_full_attention(label, way):
    policy, draft, sampling = way
    result = run(label, ROWS, policy=policy, draft=draft, sampling=SAMPLINGS[sampling], seed=5)
    assert tokens(result) == full(label, sampling)
    counts = [request.lossless for request in result.report.requests]
    assert all(count.drafted >= count.tested >= count.accepted for count in counts)
    assert sum(count.accepted for count in counts) > 0


@pytest.mark.parametrize("drafter", ["random", "wrong", "right"])
def test_an_adversarial_drafter_changes_no_token(drafter, monkeypatch):
    wanted, record = full("qwen3"), Drafts.record
    draw = random.Random(0)

    def told(drafts, picks, logits_XV, **chained):
        place, changed = 0, picks.host_2X[0].tolist()
        for state, block in zip(drafts.run.requests, drafts.blocks, strict=True):
            if block is not None and not block.reason:
                right = wanted[state.request][len(state.tokens)]
                wrong = (right + 1) % 300
                ways = {"random": draw.randrange(300), "wrong": wrong, "right": right}
                changed[place] = ways[drafter]
            place += len(block.tokens) if block else 0
        host_2X = torch.stack([torch.tensor(changed), picks.host_2X[1]])
        return record(drafts, replace(picks, host_2X=host_2X), logits_XV, **chained)

    monkeypatch.setattr(Drafts, "record", told)
    result = run("qwen3", ROWS, draft="4")
    assert tokens(result) == wanted
    shares = [request.lossless.accepted / request.lossless.drafted for request in result.report.requests]
    least, most = {"random": (0, 0.1), "wrong": (0, 0.01), "right": (1, 1)}[drafter]
    assert least <= min(shares) <= max(shares) <= most


@pytest.fixture
def runs(monkeypatch):
    runs = []

    class Kept(Drafts):
        def __post_init__(self):
            Drafts.__post_init__(self)
            runs.append(self.run)

    monkeypatch.setattr(loop, "Drafts", Kept)
    return runs


def cached(run, row):
    state = run.requests[row]
    stop = state.length - 1  # the last token's own keys were never made
    for layer in sorted(run.layers):
        yield run.store.keys(layer, row, state.prompt_tokens, stop)
        yield run.store.values(layer, row, state.prompt_tokens, stop)
        yield norms_of(run.store, layer, row, stop)[None, :, state.prompt_tokens :]


def test_the_cache_is_full_attentions(runs):
    """It holds what one does that verifies every token alone."""
    run("qwen3", ROWS, policy="streaming-llm", draft="4")
    run("qwen3", ROWS, config=SMALL.replace(trigger_policy="always"))
    ours, dense = runs
    for row in range(len(ROWS)):
        for mine, other in zip(cached(ours, row), cached(dense, row), strict=True):
            torch.testing.assert_close(mine[:, :, : other.shape[2]], other, rtol=0, atol=1e-4)


@pytest.mark.parametrize("label", first(["qwen3", "gpt-oss"]))
def test_company_changes_neither_tokens_nor_what_is_accepted(label):
    alone = [run(label, [row], draft="4").report.requests[0] for row in ROWS]
    options = [{"max_batch": 1, "engine": EngineOptions(prefill_chunk=5)}]
    if label == "qwen3":
        engines = EngineOptions(prefill_chunk=7), EngineOptions(overlap=False, graphs=False)
        options += [{"max_batch": 2, "page_size": 16}, *({"engine": engine} for engine in engines)]
    for way in options:
        together = run(label, ROWS, draft="4", **way).report.requests
        assert [request.token_ids for request in together] == [request.token_ids for request in alone]
        assert [request.lossless for request in together] == [request.lossless for request in alone]
    backwards = run(label, ROWS[::-1], draft="4").report.requests
    assert [request.lossless for request in backwards[::-1]] == [request.lossless for request in alone]


def test_stop_tokens_and_limits_end_a_request_within_a_block():
    wanted, limits = full("qwen3"), [5, 1, 17]
    stop = wanted[1][13]
    ended = [row[: row.index(stop) + 1] if stop in row else row for row in wanted]
    for draft in DRAFTS:
        result = run("qwen3", ROWS, draft=draft, stop_token_ids=[stop])
        assert tokens(result) == ended
        assert result.report.requests[1].finish_reason == "stop"
        cut = [row[:limit] for row, limit in zip(wanted, limits, strict=True)]
        assert tokens(run("qwen3", ROWS, draft=draft, max_new_tokens=limits)) == cut


def test_an_interrupted_run_reports_verified_tokens_only():
    given = []

    def interrupt(token_B):
        given.append(token_B)
        if len(given) == 9:
            raise KeyboardInterrupt

    result = run("qwen3", ROWS[:1], draft="4", on_token=interrupt)
    (request,) = result.report.requests
    assert result.interrupted
    assert request.finish_reason == "interrupted"
    assert 9 <= len(request.token_ids) < STEPS
    assert request.token_ids == full("qwen3")[0][: len(request.token_ids)]


REFUSED = {
    "cannot draft": {"policy": "freekv"},
    "full-kv cannot draft": {"policy": "full-kv"},
    "kv_device_budget": {"engine": EngineOptions(kv_device_budget="50%", kv_page=4)},
    "CUDA graphs": {"engine": EngineOptions(graphs=True)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_lossless_is_refused_by_name(message):
    with pytest.raises(Exception, match=message):
        run("qwen3", ROWS, **REFUSED[message])


def moving(kind):
    """A tiny model whose RoPE looks at the largest position of a pass."""
    model_type, rope = MOVING[kind]
    shape = {name: size for name, size in COMMON.items() if name != "head_dim"}
    rope = {"rope_type": kind, "rope_theta": 1e4, **rope}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**shape, rope_parameters=rope))


LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
MOVING = {"longrope": ("phi3", LONGROPE), "dynamic": ("llama", {"factor": 2.0})}


@pytest.mark.parametrize("kind", MOVING)
def test_a_rotation_that_depends_on_the_pass_is_refused(kind):
    given, model = [], moving(kind)
    with pytest.raises(ConfigError, match=f"lossless must be off with RoPE of the kind {kind}"):
        generate(model, None, ROWS, SMALL, engine=EngineOptions(lossless=True), on_token=given.append)
    assert not given


def test_models_with_states_decode_one_request_at_a_time():
    with pytest.raises(ConfigError, match=r"max_batch must be at most 1 .* with states, got 2"):
        run("granite-4", ROWS, max_batch=2)
    assert run("granite-4", ROWS).slots == 1


@pytest.mark.parametrize("policy", first(["quest", "codescan", "codescan compiled"]))
def test_summaries_of_keys_forget_what_was_rejected(policy, runs, monkeypatch):
    policy, _, compiled = policy.partition(" ")
    if compiled:
        pytest.importorskip("numba")
    else:
        monkeypatch.setattr("sfi_kernels.compiled.why_not", lambda: "not asked for")
    run("qwen3", ROWS, policy=policy, draft="4", config=SMALL.replace(baseline={"page": 4}))
    (ours,) = runs
    for row, state in enumerate(ours.requests):
        for layer in ours.layers:
            kept = ours.kept[layer].of(slice(row, row + 1))
            key_HTD = ours.store.keys(layer, row, 0, state.length)[0]
            if policy == "quest":
                full = state.length // 4  # the next step computes the last page anew
                for part_BHPD, end_HPD in zip(kept.pages, summarize(key_HTD[:, : 4 * full], 4), strict=True):
                    assert torch.equal(part_BHPD[0, :, :full], end_HPD)
            else:
                codes = kept
                word_HWT = words_of(key_HTD, codes.mean_BHD[0], codes.encode_BHWDC[0])
                assert torch.equal(codes.word_BHWT[0, :, :, : state.length], word_HWT)
                summed, first = int(codes.summed_BH[0, 0]), state.sink(SMALL.sink)
                value_HTD = ours.store.values(layer, row, first, summed)[0]
                torch.testing.assert_close(codes.sum_BHE[0], value_HTD.sum(1), rtol=1e-4, atol=1e-4)


@cache
def told():
    seen = RecordingObserver()
    return run("qwen3", ROWS, draft="4", observers=[seen]), seen


def test_observers_are_told_of_every_token_and_change_none():
    result, seen = told()
    assert tokens(result) == full("qwen3")
    for request, report in enumerate(result.report.requests):
        steps = [event for event in seen.steps if event.request == request]
        checks = [check for check in seen.verifications if check.request == request]
        assert [event.token_id for event in steps] == report.token_ids
        assert [event.step for event in steps] == list(range(STEPS))
        assert 1 + sum(check.accepted + 1 for check in checks) == STEPS
        assert sum(event.drafted for event in steps) == sum(check.accepted for check in checks)
        assert [event.step for event in steps if event.slow][1:] == [check.step for check in checks]
        bases = [check.base for check in checks]
        assert bases == [steps[check.step - check.accepted - 1].position + 1 for check in checks]
        read = sum(check.attended_tokens for check in checks)
        context = sum(event.context_tokens for event in steps[1:])
        assert report.read_ratio == pytest.approx(read / context)
        for check in checks:
            rejected = steps[check.step].draft_token_id not in (None, steps[check.step].token_id)
            assert rejected == (check.accepted < check.drafted)


def test_what_a_rejected_token_selected_is_never_read():
    result, seen = told()
    for request, report in enumerate(result.report.requests):
        checks = [check for check in seen.verifications if check.request == request]
        fell = [check for check in checks if check.accepted < check.drafted]
        assert fell, "something was rejected"
        assert all(check.evidence_position is None for check in fell)
        after = [then.reason for check, then in pairwise(checks) if check in fell]
        assert set(after) == {"rejected"}
        selected = {event.step for event in seen.selections if event.request == request}
        assert selected == {0, *(check.step for check in checks if check not in fell)}
        assert report.reasons["rejected"] == len(after)


@pytest.mark.parametrize("policy", first(["codescan", "quest", "oracle-top-k"]))
def test_what_kept_steps_selected_is_told_at_their_own_steps(policy):
    """Each fast step selects for itself, and a verification for nobody."""
    seen = RecordingObserver()
    result = run("qwen3", ROWS, policy=policy, draft="4", observers=[seen])
    selected = [(event.request, event.step, event.layer) for event in seen.selections if event.step]
    drafted = [(event.request, event.step) for event in seen.steps if event.drafted]
    assert len(selected) == len(set(selected))
    assert {at[:2] for at in selected} == set(drafted)
    fell = sum(request.lossless.drafted - request.lossless.accepted for request in result.report.requests)
    assert fell
    assert all(check.evidence_position is None for check in seen.verifications)


@pytest.mark.exhaustive
def test_a_basis_of_the_prompt_asks_verifications_for_no_evidence(monkeypatch):
    asked, attend = [], Layer.dense_with_logits
    monkeypatch.setattr("sfi_kernels.compiled.why_not", lambda: "not installed")  # compiled steps have no such call
    monkeypatch.setattr(Layer, "dense_with_logits", lambda *args, **more: asked.append(1) or attend(*args, **more))
    run("qwen3", ROWS, policy="codescan", draft="4")
    assert not asked
    run("qwen3", ROWS, policy="sfi", draft="4")
    assert asked


def test_drafts_are_compared_with_full_attention():
    result, seen = told()
    drafted = {(e.request, e.step): e.draft_token_id for e in seen.steps if e.draft_token_id is not None}
    heard = {
        (request, step): (kl.item(), agrees.item())
        for event in seen.logits
        for request, step, kl, agrees in zip(event.requests, event.steps, event.kl_R, event.agrees_R, strict=True)
    }
    assert set(heard) == set(drafted)
    # greedy: the drafted token is the most probable one
    for (request, step), (kl, agrees) in heard.items():
        token = result.report.requests[request].token_ids[step]
        assert agrees == (drafted[request, step] == token)
        assert kl >= 0


def test_a_drafting_step_costs_what_choosing_reads_and_a_verification_what_it_refreshes(monkeypatch):
    rules = {}

    def rule_of(**given):
        rules[policy] = DraftRule(**given)
        return rules[policy]

    monkeypatch.setattr(decoder, "DraftRule", rule_of)
    for policy in ("sfi", "quest", "codescan"):
        run("qwen3", ROWS, policy=policy, max_new_tokens=2)
    state = RequestState(length=400, recent_start=394, prompt_tokens=100)
    assert rules["sfi"].selecting(state) == 0 < rules["quest"].selecting(state)
    costs = {policy: rule.cost(400.0, 20.0) for policy, rule in rules.items()}
    shares = {policy: cost.fast / cost.verification(15) for policy, cost in costs.items()}
    assert shares["sfi"] < shares["quest"] == shares["codescan"]


def test_a_seed_that_was_drawn_is_told():
    sampling = SAMPLINGS["sampled"]
    result = run("qwen3", ROWS, draft="4", sampling=sampling)
    given = tokens(result)
    again, other = (tokens(run("qwen3", ROWS, draft="4", sampling=sampling, seed=result.seed + n)) for n in (0, 1))
    assert again == given != other
    assert run("qwen3", ROWS[:1], draft="4").seed is None


def test_no_token_is_told_apart_from_every_token():
    """What each prompt is told, without `None`, is its output, whatever the padding token is."""
    shown = []
    result = run("qwen3", ROWS, draft="4", max_batch=2, on_token=shown.append)
    outputs = [[token for token in column if token is not None] for column in zip(*shown, strict=True)]
    assert outputs == tokens(result)
    assert any(None in step for step in shown)
