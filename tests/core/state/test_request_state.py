"""Eqs. 1-3 and 25: which tokens may be selected, which are read, and how the recent segment moves."""

import random
from dataclasses import dataclass

import pytest
import torch

from sfi_core.engine.batch_pass import allowed_positions
from sfi_core.state.request import RequestState

SINK, RECENT = 4, 8


def prefilled(prompt: int, sink: int = SINK, recent: int = RECENT) -> RequestState:
    state = RequestState()
    state.begin(slow=True, reason="first", new_tokens=prompt)
    state.prompt_tokens = prompt
    state.move_recent(sink, recent, sliding=False)
    return state


def allowed(state: RequestState, sink: int = SINK) -> list[int]:
    bounds = torch.tensor([[state.sink(sink)], [state.recent_start]])
    mask = allowed_positions(state.length, *bounds)
    assert mask.shape == (1, state.length)
    return mask[0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (1, []), (SINK - 1, []), (SINK, []), (SINK + RECENT - 1, []), (SINK + RECENT, []), (SINK + RECENT + 1, [4]),
        (SINK + RECENT + 4, [4, 5, 6, 7]),
    ],
)  # fmt: skip
def test_candidates_are_all_but_sink_and_recent(prompt: int, expected: list[int]):
    """Eq. 2; without a sink the first token is a candidate."""
    assert allowed(prefilled(prompt)) == expected
    without = prefilled(prompt, sink=0)
    assert allowed(without, sink=0) == list(range(max(0, prompt - RECENT)))


@pytest.mark.parametrize("prompt", [1, 3, 4, 7, 12, 13, 50])
def test_sink_recent_and_candidates_are_the_history_without_overlap(prompt: int):
    state = prefilled(prompt)
    sink = list(range(state.sink(SINK)))
    recent = list(range(state.recent_start, state.length))
    assert sink + allowed(state) + recent == list(range(prompt))


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("prompt", [1, 4, 12, 13, 40])
def test_a_slow_step_puts_the_segment_over_the_last_recent_tokens(prompt: int, sliding: bool):
    state = prefilled(prompt)
    state.begin(slow=True, reason="trigger", new_tokens=1)
    state.move_recent(SINK, RECENT, sliding=sliding)
    expected = max(min(SINK, prompt), prompt + 1 - RECENT)
    assert state.recent_start == expected


@pytest.mark.parametrize("sliding", [False, True])
def test_an_anchored_segment_grows_on_fast_steps_and_a_sliding_one_keeps_its_width(sliding: bool):
    """Eq. 3, with our anchor, and as the paper has it."""
    state = prefilled(40)
    for step in range(1, 6):
        state.begin(slow=False, reason="", new_tokens=1)
        state.move_recent(SINK, RECENT, sliding=sliding)
        assert (state.recent_start, state.length) == (32 + sliding * step, 40 + step)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("prompt", [1, 2, 3])
def test_the_query_is_read_however_short_the_prompt(prompt: int, sliding: bool):
    """The prompt has fewer tokens than the sink: a token decoded later is no sink, but recent."""
    state = prefilled(prompt)
    for _ in range(6):
        state.begin(slow=False, reason="", new_tokens=1)
        state.move_recent(SINK, RECENT, sliding=sliding)
        assert state.sink(SINK) == prompt
        assert state.sink(SINK) <= state.recent_start < state.length


def test_a_step_whose_heads_differ_reads_the_share_of_each_kind():
    """5 layers, one left dense; 1.5 layers' worth of the other heads read everything."""
    state = prefilled(40)  # the recent segment begins at 32
    state.note_packed(SINK, 6)
    state.begin(slow=False, reason="", new_tokens=1)
    state.move_recent(SINK, RECENT, sliding=False)
    assert state.attended(5, 1) == (41 + 4 * (SINK + 6 + 9)) / 5
    assert state.attended(5, 1, 1.5) == (2.5 * 41 + 2.5 * (SINK + 6 + 9)) / 5
    state.begin(slow=True, reason="t_max", new_tokens=1)
    state.move_recent(SINK, RECENT, sliding=False)
    assert (state.recent_start, state.read_start) == (34, 32)
    state.note_packed(SINK, 3)  # what the step has selected is read from the next one on
    assert state.attended(5, 1) == 42
    assert state.attended(5, 1, 1.5) == (2.5 * 42 + 2.5 * (SINK + 6 + 10)) / 5


def test_what_is_selected_ahead_counts_from_the_next_step_on():
    """One more token has left the recent segment by then."""
    state = prefilled(SINK + RECENT)
    state.note_packed(SINK, 6)
    assert state.packed_tokens == SINK
    state.note_packed(SINK, 6, ahead=True)
    assert state.packed_tokens == SINK
    state.begin(slow=False, reason="", new_tokens=1)
    assert state.packed_tokens == SINK + 1


@dataclass
class Refreshed:
    """A request at some step of a random run, with what its last slow step knew."""

    state: RequestState
    candidates: set[int]
    t_max: int

    @property
    def unread_and_unranked(self) -> set[int]:
        read = {*range(self.state.sink(SINK)), *range(self.state.recent_start, self.state.length)}
        return set(range(self.state.length)) - read - self.candidates


def random_runs(*, sliding: bool):
    """Yield every step of many runs with random prompts and slow steps, no more than t_max apart."""
    draw = random.Random(0)
    for _ in range(60):
        t_max = draw.randrange(20)
        state = prefilled(draw.randrange(1, 40))
        candidates = set(allowed(state))
        for _ in range(60):
            slow = state.steps_since_slow >= t_max or draw.random() < 0.1
            state.begin(slow=slow, reason="t_max" if slow else "", new_tokens=1)
            state.move_recent(SINK, RECENT, sliding=sliding)
            if slow:
                candidates = set(allowed(state))
            yield Refreshed(state, candidates, t_max)


def test_with_anchored_recents_no_token_is_ever_unread_and_unranked():
    gaps = [step.unread_and_unranked for step in random_runs(sliding=False)]
    assert len(gaps) == 3600
    assert not any(gaps)


def test_with_sliding_recents_what_leaves_the_window_is_in_no_set():
    """The paper's gap: as many tokens as fast steps have pushed out of the window."""
    widest = 0
    for step in random_runs(sliding=True):
        gap, state = step.unread_and_unranked, step.state
        assert gap == set(range(state.recent_start - len(gap), state.recent_start))
        assert len(gap) <= state.steps_since_slow
        if state.length - state.steps_since_slow >= SINK + RECENT:  # the window was full
            assert len(gap) == state.steps_since_slow
        widest = max(widest, len(gap))
    assert widest == 19


def test_t_max_bounds_the_growth_of_an_anchored_segment():
    grown = []
    for step in random_runs(sliding=False):
        recent = step.state.length - step.state.recent_start
        assert recent <= RECENT + step.t_max
        grown.append(recent - RECENT - step.t_max)
    assert max(grown) == 0


def test_candidates_stay_before_the_recent_segment_on_fast_steps():
    for sliding in (False, True):
        for step in random_runs(sliding=sliding):
            assert max(step.candidates, default=-1) < step.state.recent_start


def test_beginning_a_step_moves_the_clock():
    state = prefilled(10)
    assert (state.step, state.length, state.steps_since_slow) == (0, 10, 0)
    for _ in range(2):
        state.begin(slow=False, reason="", new_tokens=1)
    assert (state.step, state.length, state.steps_since_slow, state.slow) == (2, 12, 2, False)
    state.begin(slow=True, reason="trigger", new_tokens=1)
    assert (state.steps_since_slow, state.reason) == (0, "trigger")


def test_finished_slow_steps_are_counted_with_their_reasons():
    state = prefilled(10)
    state.finish_step(7)
    for reason in ("", "trigger", "", "t_max"):
        state.begin(slow=bool(reason), reason=reason, new_tokens=1)
        state.finish_step(8)
    assert state.tokens == [7, 8, 8, 8, 8]
    assert state.tally.slow_at == [0, 2, 4]
    assert state.tally.reasons == {"first": 1, "trigger": 1, "t_max": 1}
    state.begin(slow=True, reason="trigger", new_tokens=1)  # and does not finish
    assert state.tally.slow_at == [0, 2, 4]
    assert state.tally.reasons["trigger"] == 1
