"""Which steps a replay calls slow: the product's own rules over the recorded tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest

from sfi_core.errors import ConfigError, TraceError
from sfi_core.state.request import RequestState
from sfi_traces.model.steps import Memory
from sfi_traces.model.trace import Trace
from sfi_traces.replay import RecordedVocabulary, Setting, Supports, grid, schedule
from tests.traces.made import PROMPT, STOP, make_trace
from tests.traces.small import fixed_trace, redact
from tests.traces.test_replay import setting

STEPS = 60
trace = fixed_trace(steps=STEPS)


@pytest.fixture(scope="module")
def supports(trace) -> Supports:
    return Supports.load(trace)[0]


def slow_at(supports: Supports, setting: Setting) -> dict[int, str]:
    return {step: reason for step, reason in enumerate(schedule(supports, setting)) if reason}


def expected(tokens: list[int], config) -> dict[int, str]:
    """Eq. 5 and T_max, written out anew."""
    slow, last = {0: "first"}, 0
    for step in range(1, len(tokens)):
        back = step - 1 - config.trigger_delay
        if step < config.slow_start:
            slow[step] = "first"
        elif back >= 0 and tokens[back] == STOP and step - last >= max(1, config.min_gap):
            slow[step] = "trigger"
        elif step - last > config.t_max:
            slow[step] = "t_max"
        last = step if step in slow else last
    return slow


@pytest.mark.parametrize("seed", range(5))
def test_boundaries_and_t_max_follow_eq_5(supports, seed):
    chance = random.Random(seed)
    tokens = [STOP if chance.random() < 0.15 else 1 for _ in range(STEPS)]
    changed = replace(supports, tokens=tokens)
    rules = setting(
        t_max=chance.choice([0, 3, 8, 100]),
        min_gap=chance.choice([0, 2, 7]),
        trigger_delay=chance.choice([0, 1, 3]),
        slow_start=chance.choice([1, 2, 5]),
    )
    assert slow_at(changed, rules) == expected(tokens, rules.config)


@pytest.mark.parametrize(
    ("rules", "steps"),
    [
        ({"trigger_policy": "never"}, [0]),
        ({"trigger_policy": "always"}, list(range(STEPS))),
        ({"t_max": 0}, list(range(STEPS))),
        ({"trigger_policy": "stride", "stride": 25}, [0, 25, 50]),
        ({"trigger_policy": "t-max", "t_max": 24}, [0, 25, 50]),
    ],
)
def test_policies_without_boundaries(supports, rules, steps):
    assert list(slow_at(supports, setting(**rules))) == steps


def test_random_steps_are_those_of_the_run_s_own_rule(supports):
    def steps(rate, seed=0, **changes):
        axes = {"random_rate": [rate], "trigger_seed": [seed]}
        (rules,) = grid(setting(**changes), ["random"], {}, axes)
        return slow_at(supports, rules)

    assert list(steps(0.0)) == [0]
    assert list(steps(1.0)) == list(range(STEPS))
    assert list(steps(1.0, min_gap=7)) == list(range(0, STEPS, 7))
    delay, tokens = setting().config.trigger_delay, supports.tokens
    read = [int(tokens[step - 1 - delay]) if step > delay else None for step in range(1, STEPS)]
    drawn = [random.Random(f"4 {PROMPT} {step} {x}").random() < 0.3 for step, x in enumerate(read, 1)]
    assert list(steps(0.3, seed=4)) == [0, *(np.flatnonzero(drawn) + 1)]
    assert steps(0.3) != steps(0.3, seed=4)
    assert set(steps(0.3).values()) == {"first", "random"}


@pytest.mark.parametrize(("mode", "recent"), [("anchored", 1), ("sliding", 16), ("anchored", 190), ("sliding", 1000)])
def test_sizes_of_the_memory_are_those_of_the_sparse_state(supports, mode, recent):
    rules = setting(recent_mode=mode, recent=recent, budget=20, t_max=7)
    reasons = schedule(supports, rules)
    slow = np.array([bool(reason) for reason in reasons])
    memory = Memory.of(rules.config.to_dict(), slow, supports.length_N)
    state = RequestState(prompt_tokens=PROMPT)
    for step, reason in enumerate(reasons):
        state.begin(slow=bool(reason), reason=reason, new_tokens=1 if step else PROMPT)
        state.move_recent(4, recent, sliding=mode == "sliding")
        if state.slow:
            state.packed_tokens = 4 + min(20, state.recent_start - 4)
        assert memory.start_N[step] == state.recent_start
        read = state.length if state.slow else state.packed_tokens + state.length - state.recent_start
        assert memory.read_N[step] == read


def test_a_grid_holds_each_counterfactual_once():
    """Under "stride" T_max and the trigger set change nothing, under "boundary" the stride does not."""
    settings = grid(
        setting(),
        ["boundary", "stride", "never"],
        {"stop": frozenset({STOP}), "full stop": frozenset({STOP}), "none": frozenset()},
        {"t_max": [8, 16], "stride": [4, 5], "budget": [10, 20]},
    )
    keys = [(s.policy, s.triggers, s.config.t_max, s.config.stride, s.config.budget) for s in settings]
    assert len(keys) == 2 * (2 * 2) + 2 * 2 + 2
    assert {k[1] for k in keys if k[0] == "boundary"} == {"stop", "none"}
    row = settings[-1].to_dict()
    assert (row["policy"], row["t_max"], row["stride"], row["triggers"]) == ("never", None, None, None)
    assert row["budget"] == 20


def test_trigger_strings_match_recorded_tokens_as_a_run_would_match_its_tokenizer():
    words = {1: ".", 2: " .", 3: "...", 4: '."\n', 5: "Mr.", 6: " Mr.", 7: "\n\n", 8: " the", 9: "。",
             10: "!=", 11: "?!", 12: ".", 13: "3."}  # fmt: skip
    vocabulary = RecordedVocabulary(words)
    assert vocabulary.trigger_ids(["."]) == {1, 2, 3, 4, 9, 12}
    assert vocabulary.trigger_ids(["!", "Mr."]) == {5, 6, 11}
    assert vocabulary.trigger_ids(["\n"]) == {4, 7}
    assert vocabulary.trigger_ids([";", "</think>"]) == set()
    with pytest.raises(ConfigError, match="triggers must be non-empty"):
        vocabulary.trigger_ids(["", "."])


def test_a_redacted_trace_replays_its_own_triggers_only(tmp_path, trace):
    redacted = Trace.open(redact(make_trace(tmp_path / "trace", steps=STEPS)))
    redacted_supports = Supports.load(redacted)[0]
    assert slow_at(redacted_supports, Setting.recorded(redacted)) == slow_at(
        Supports.load(trace)[0], Setting.recorded(trace)
    )
    with pytest.raises(TraceError, match="is redacted; it can be replayed with its own triggers"):
        RecordedVocabulary.of([redacted])
