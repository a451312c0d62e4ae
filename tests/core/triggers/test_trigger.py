"""Eq. 5, T_max and the rules around them."""

from typing import Any

import pytest

from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger

STOP, WORD = 7, 1  # 7 is in T_trig
PAPER = SfiConfig.preset("paper")


def slow_steps(tokens: list[int], **settings) -> dict[int, str]:
    """Run the rule over a request's tokens x_0, x_1, ...; map each slow step t >= 1 to its reason.

    `tokens` are told one by one, as decoding does: step t sees x_0 to x_{t-1}.
    """
    settings = {"trigger_delay": 0, "t_max": 1000, **settings}
    trigger = Trigger(frozenset({STOP}), PAPER.replace(**settings))
    state = RequestState(prompt_tokens=10)
    state.begin(slow=True, reason="first", new_tokens=10)
    slow = {}
    for token in tokens:
        state.finish_step(token)
        reason = trigger.reason(state)
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        if reason:
            slow[state.step] = reason
    return slow


def text(length: int, *stops: int) -> list[int]:
    """Return that many words with boundary tokens at `stops`."""
    return [STOP if t in stops else WORD for t in range(length)]


def test_step_after_a_boundary_token_is_slow():
    """Eq. 5: g_t = 1 if x_{t-1} is in T_trig."""
    assert slow_steps(text(10, 3, 6)) == {4: "trigger", 7: "trigger"}
    assert slow_steps(text(5, 0)) == {1: "trigger"}, "the first generated token counts"


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_delay_puts_the_slow_step_off_by_that_many_steps(delay: int):
    assert list(slow_steps(text(12, 3, 7), trigger_delay=delay)) == [4 + delay, 8 + delay]


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_tokens_of_the_prompt_never_trigger(delay: int):
    assert slow_steps(text(6), trigger_delay=delay) == {}
    state = RequestState(prompt_tokens=10, length=10, step=0)
    trigger = Trigger(frozenset({STOP}), PAPER.replace(trigger_delay=delay))
    assert trigger.reason(state) == ""


@pytest.mark.parametrize("t_max", [0, 1, 2, 5])
def test_t_max_is_the_largest_number_of_consecutive_fast_steps(t_max: int):
    slow = slow_steps(text(30), t_max=t_max)
    assert list(slow) == list(range(t_max + 1, 31, t_max + 1))
    assert set(slow.values()) == {"t_max"}


@pytest.mark.parametrize(
    ("gap", "expected"), [(0, [3, 4, 6, 9]), (1, [3, 4, 6, 9]), (2, [3, 6, 9]), (4, [4, 9]), (5, [6]), (10, [])]
)
def test_a_trigger_too_soon_after_a_slow_step_is_dropped(gap: int, expected: list[int]):
    """Steps 3, 4, 6 and 9 follow a boundary token, step 0 is slow; a dropped trigger never comes back."""
    stops = [t - 1 for t in (3, 4, 6, 9)]
    assert list(slow_steps(text(16, *stops), min_gap=gap)) == expected


def test_min_gap_does_not_hold_t_max_back_and_a_trigger_is_named_when_both_are_due():
    assert slow_steps(text(6, 4), t_max=4) == {5: "trigger"}
    assert slow_steps(text(9), t_max=2, min_gap=8) == {3: "t_max", 6: "t_max", 9: "t_max"}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("boundary", {4: "trigger", 8: "t_max"}),
        ("t-max", {4: "t_max", 8: "t_max"}),
        ("stride", {5: "stride"}),
        ("never", {}),
        ("always", dict.fromkeys(range(1, 10), "always")),
    ],
)
def test_each_policy_asks_its_own_question(policy: str, expected: dict[int, str]):
    tokens = text(9, 3)
    assert slow_steps(tokens, trigger_policy=policy, t_max=3, stride=5) == expected


@pytest.mark.parametrize("trigger_policy", ["boundary", "t-max", "stride", "never"])
def test_the_first_steps_are_slow_under_every_policy_if_asked(trigger_policy: str):
    settings = {"slow_start": 3, "trigger_policy": trigger_policy}
    assert slow_steps(text(8), **settings) == {1: "first", 2: "first"}


def drawn(settings: dict[str, Any], **fields: Any) -> str:
    config = PAPER.replace(trigger_policy="random", **settings)
    state = RequestState(**{"step": 9, "steps_since_slow": 9, "prompt_tokens": 50, "tokens": [1], **fields})
    return Trigger(frozenset(), config).reason(state)


def test_gap_and_t_max_hold_for_chance():
    sure = {"random_rate": 1.0}
    assert drawn(sure) == "random"
    assert drawn({**sure, "min_gap": 11}) == ""
    assert drawn({**sure, "min_gap": 11, "t_max": 9}) == "t_max"


def test_chance_follows_rate_and_seed():
    def steps(**settings: Any) -> list[int]:
        return [i for i in range(500) if drawn(settings, step=i)]

    assert len(steps(random_rate=0.25)) == pytest.approx(125, abs=40)
    assert steps(random_rate=0.25) == steps(random_rate=0.25)
    assert steps(random_rate=0.25) != steps(random_rate=0.25, trigger_seed=1)
    assert set(steps(random_rate=0.1)) < set(steps(random_rate=0.25))


def test_chance_tells_requests_of_one_length_apart_by_their_text():
    def steps(text: list[int]) -> list[int]:
        return [i for i in range(50) if drawn({"random_rate": 0.5, "trigger_delay": 0}, step=i, tokens=text)]

    assert steps([1] * 50) != steps([2] * 50)
