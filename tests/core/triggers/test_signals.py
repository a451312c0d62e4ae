"""Triggers that look at queries and distributions, against the plain model."""

from typing import Any

import pytest
import torch

import sfi_core
from sfi_core import slow_fast
from sfi_core.settings.audit import AuditConfig
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from tests.fakes import RecordingObserver

PROMPTS = [list(range(40, 90)), list(range(20))]
NEW, COSINE, ENTROPY = 30, 0.1, 3.5
CONFIG = SfiConfig(slow_start=1, min_gap=0, span=0, sink=3, recent=6, budget=5, t_max=100)


def complete(model: Any, config: SfiConfig, prompts: Any = PROMPTS, **options: Any) -> Any:
    return sfi_core.generate(
        model, None, prompts, config, max_new_tokens=NEW, stop_token_ids=(), **options
    ).report.requests


def expected(values: list[float], fires: Any) -> list[int]:
    """The steps after those that fire, and step 0."""
    return [0, *(step + 1 for step, value in enumerate(values[:-1]) if fires(value))]


def test_cosine_makes_the_step_after_a_moved_query_slow(tiny_model: Any):
    """The audit measures each layer's and head's cosine by itself; their mean decides."""
    config = CONFIG.replace(trigger_policy="cosine", cosine_threshold=COSINE)
    observer = RecordingObserver()
    requests = complete(tiny_model, config, observers=[observer], audit=AuditConfig(every=1, top=4))
    for row, request in enumerate(requests):
        cosine = []
        for step in range(NEW):
            own = [e.query_cosine_H for e in observer.audits if (e.request, e.step) == (row, step)]
            cosine.append(float(torch.cat(own).mean()))
        assert request.slow_at == expected(cosine, lambda value: value < COSINE)
        assert 3 < len(request.slow_at) < NEW - 3
        assert request.reasons == {"first": 1, "cosine": len(request.slow_at) - 1}


def test_entropy_makes_the_step_after_an_unsure_one_slow(tiny_model: Any):
    """Under our own loop; the logits are those of the step before."""
    config = CONFIG.replace(trigger_policy="entropy", entropy_threshold=ENTROPY)
    with slow_fast(tiny_model, None, config) as session, torch.no_grad():
        output = tiny_model.generate(
            input_ids=torch.tensor(PROMPTS[:1]), max_new_tokens=NEW, do_sample=False,
            output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
    entropy = [
        float(torch.distributions.Categorical(logits=x[0].double()).entropy())
        for x in output.logits
    ]
    request = session.report.requests[0]
    assert request.slow_at == expected(entropy, lambda value: value > ENTROPY)
    assert 3 < len(request.slow_at) < NEW - 3
    assert complete(tiny_model, config, PROMPTS[:1])[0].slow_at == request.slow_at


@pytest.mark.parametrize("policy", ["cosine", "entropy", "random"])
def test_a_row_of_a_batch_is_slow_where_it_is_alone(tiny_model: Any, policy: str):
    settings = {"cosine_threshold": COSINE, "entropy_threshold": ENTROPY, "random_rate": 0.3}
    config = CONFIG.replace(trigger_policy=policy, **settings)
    together = complete(tiny_model, config)
    assert together[0].slow_at != together[1].slow_at
    for row, prompt in enumerate(PROMPTS):
        assert complete(tiny_model, config, [prompt])[0] == together[row]


def state(**fields: Any) -> RequestState:
    return RequestState(
        **{"step": 9, "steps_since_slow": 9, "prompt_tokens": 50, "tokens": [1], **fields}
    )


def reason(policy: str, settings: dict[str, Any], **fields: Any) -> str:
    config = CONFIG.replace(trigger_policy=policy, **settings)
    return Trigger(frozenset(), config).reason(state(**fields))


def test_a_signal_that_was_not_measured_does_not_fire():
    assert reason("cosine", {"cosine_threshold": 1.0}) == ""
    assert reason("entropy", {"entropy_threshold": 0.0}) == ""


@pytest.mark.parametrize(
    ("policy", "fields"),
    [("cosine", {"cosine": 0.1}), ("entropy", {"entropy": 5.0}), ("random", {})],
)
def test_gap_and_t_max_hold_for_every_trigger_that_looks(policy: str, fields: dict[str, Any]):
    sure = {"random_rate": 1.0}
    assert reason(policy, sure, **fields) == policy
    assert reason(policy, {**sure, "min_gap": 11}, **fields) == ""
    assert reason(policy, {**sure, "min_gap": 11, "t_max": 9}, **fields) == "t_max"


def test_chance_follows_rate_and_seed():
    def steps(**settings: Any) -> list[int]:
        return [i for i in range(2000) if reason("random", settings, step=i)]

    assert len(steps(random_rate=0.25)) == pytest.approx(500, abs=80)
    assert steps(random_rate=0.25) == steps(random_rate=0.25)
    assert steps(random_rate=0.25) != steps(random_rate=0.25, trigger_seed=1)
    assert set(steps(random_rate=0.1)) < set(steps(random_rate=0.25))
