"""What a lossless run tells: its observers, its caller token by token, and its result."""

from functools import cache
from itertools import pairwise

import pytest

from sfi_core.engine.layer import Layer
from sfi_core.engine.lossless import DraftRule
from sfi_core.hosts.transformers import decoder
from sfi_core.state.request import RequestState
from tests.core.generation.test_lossless import ROWS, SAMPLINGS, STEPS, full, run, tokens
from tests.fakes import RecordingObserver

pytestmark = pytest.mark.seam


@cache
def told():
    """A run of drafts, some of them rejected, and all that its observer heard."""
    seen = RecordingObserver()
    return run("qwen3", ROWS, draft="4", observers=[seen]), seen


def test_observers_are_told_of_every_token_and_change_none():
    result, seen = told()
    assert tokens(result) == full("qwen3")
    for request, report in enumerate(result.report.requests):
        steps = [one for one in seen.steps if one.request == request]
        checks = [one for one in seen.verifications if one.request == request]
        assert [one.token_id for one in steps] == report.token_ids
        assert [one.step for one in steps] == list(range(STEPS))
        assert 1 + sum(one.accepted + 1 for one in checks) == STEPS
        assert sum(one.drafted for one in steps) == sum(one.accepted for one in checks)
        assert [one.step for one in steps if one.slow][1:] == [one.step for one in checks]
        bases = [one.base for one in checks]
        assert bases == [steps[one.step - one.accepted - 1].position + 1 for one in checks]
        read = sum(one.attended_tokens for one in checks)
        context = sum(one.context_tokens for one in steps[1:])
        assert report.read_ratio == pytest.approx(read / context)
        for one in checks:
            rejected = steps[one.step].draft_token_id not in (None, steps[one.step].token_id)
            assert rejected == (one.accepted < one.drafted)


def test_what_a_rejected_token_selected_is_never_read():
    result, seen = told()
    for request, report in enumerate(result.report.requests):
        checks = [one for one in seen.verifications if one.request == request]
        fell = [one for one in checks if one.accepted < one.drafted]
        assert fell, "something was rejected"
        assert all(one.evidence_position is None for one in fell)
        after = [then.reason for one, then in pairwise(checks) if one in fell]
        assert set(after) == {"rejected"}
        selected = {one.step for one in seen.selections if one.request == request}
        assert selected == {0, *(one.step for one in checks if one not in fell)}
        assert report.reasons["rejected"] == len(after)


@pytest.mark.parametrize("policy", ["codescan", "quest", "oracle-top-k"])
def test_what_kept_steps_selected_is_told_at_their_own_steps(policy):
    """Each fast step selects for itself, and a verification for nobody."""
    seen = RecordingObserver()
    result = run("qwen3", ROWS, policy=policy, draft="4", observers=[seen])
    told = [(one.request, one.step, one.layer) for one in seen.selections if one.step]
    drafted = [(one.request, one.step) for one in seen.steps if one.drafted]
    assert len(told) == len(set(told))
    assert {one[:2] for one in told} == set(drafted)
    fell = sum(one.lossless.drafted - one.lossless.accepted for one in result.report.requests)
    assert fell
    assert all(one.evidence_position is None for one in seen.verifications)


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
    assert costs["sfi"] < costs["quest"] == costs["codescan"]


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
    told = [[token for token in column if token is not None] for column in zip(*shown, strict=True)]
    assert told == tokens(result)
    assert any(None in step for step in shown)
