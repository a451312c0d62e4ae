"""The prediction of lossless runs: the chain against every path, the best draft, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from sfi_core.errors import ConfigError, TraceError
from sfi_core.settings.config import SfiConfig
from sfi_core.state.request import RequestState
from sfi_core.triggers.trigger import Trigger
from sfi_traces.read.reader import Trace
from sfi_traces.record.parquet import ParquetObserver
from sfi_traces.tune.lossless.acceptance import Acceptance, bins
from sfi_traces.tune.lossless.cycles import Schedule, expected
from sfi_traces.tune.lossless.search import LosslessTuning
from tests.traces.lossless import LosslessRun
from tests.traces.made import STOP, make_trace
from tests.traces.small import change_manifest

REQUESTS = (60, 45, 80, 70)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossless") / "run"
    with ParquetObserver(folder) as observer:
        LosslessRun(observer, most=REQUESTS, right=0.8)
    return Trace.open(folder)


@pytest.fixture(scope="module")
def tuning(trace):
    return LosslessTuning.of([trace], axes={}, trigger_sets={})


def schedule(**changes) -> Schedule:
    plain = {"trigger_delay": 1, "min_gap": 2, "t_max": 5, "slow_start": 2, "max_tokens": 4}
    return Schedule(token_ids=frozenset({STOP}), **(plain | changes))


def draft_length(tokens, step: int, one: Schedule) -> int:
    """Ask the run's own Trigger token after token."""
    config = SfiConfig().replace(
        trigger_delay=one.trigger_delay, min_gap=one.min_gap, t_max=one.t_max,
        slow_start=one.slow_start,
    )  # fmt: skip
    trigger, drafted = Trigger(one.token_ids or frozenset(), config), 0
    while True:
        state = RequestState(request=0, prompt_tokens=9)
        state.step, state.steps_since_slow = step + drafted, drafted
        state.tokens = list(tokens[: step + drafted + 1])
        reason = trigger.reason(state)
        if reason == "first" or (reason and one.token_ids is not None):
            return drafted
        if drafted + 1 >= len(tokens) - step - 1 or drafted >= one.max_tokens:
            return drafted
        drafted += 1


def brute(text, one, rate, costs, *, repeats: bool) -> np.ndarray:
    """Follow every path: probability-weighted verifications, drafted, kept, tokens read, bytes."""
    total = np.zeros(5)

    def follow(step: int, chance: float, fresh: bool) -> None:
        if step == len(text.tokens) - 1:
            return
        drafted = draft_length(text.tokens, step, one) if fresh else 0
        read = spent = 0.0
        for depth in range(1, drafted + 1):
            length = float(text.context_T[step + depth])
            attended = min(length, costs.attended + costs.grows * depth)
            read, spent = read + attended, spent + costs.model.mean(length, attended, 0, 0)
        length = float(text.context_T[step + drafted + 1])
        spent += costs.model.slow(length, min(length, costs.packed))
        kept = chance
        for accepted in range(drafted + 1):
            right = rate(step + accepted + 1, accepted + 1) if accepted < drafted else 0.0
            here = kept * (1 - right)
            total[:] += here * np.array([1, drafted, accepted, read + length, spent])
            if here:
                follow(step + accepted + 1, here, accepted == drafted or not repeats)
            kept *= right

    follow(0, 1.0, True)
    return total


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"trigger_delay": 0, "min_gap": 0},
        {"trigger_delay": 2, "slow_start": 1, "max_tokens": 2},
        {"t_max": 3},
        {"token_ids": None},
    ],
)
def test_the_chain_is_the_sum_over_every_path(tuning, changes, repeats):
    text = tuning.texts[1]
    text = replace(text, tokens=text.tokens[:14], context_T=text.context_T[:14])
    one = replace(schedule(), **changes)
    sentences = frozenset({STOP})
    acceptance = Acceptance.of(tuning.texts, sentences)
    place_T = text.places(sentences)
    (found,) = expected([text], [one], acceptance, sentences, tuning.costs, repeats=repeats)

    def rate(step: int, depth: int) -> float:
        return float(acceptance.rate_X[bins(place_T[step], np.array(depth))])

    sums = brute(text, one, rate, tuning.costs, repeats=repeats)
    ours = [found.verifications, found.drafted, found.accepted, found.read_tokens, found.bytes]
    np.testing.assert_allclose(ours, sums, rtol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"token_ids": None}, {"min_gap": 5, "trigger_delay": 0}])
def test_drafts_end_where_the_run_s_own_rules_end_them(tuning, changes):
    one = replace(schedule(max_tokens=9, t_max=8), **changes)
    for text in tuning.texts:
        last = len(text.tokens) - 1
        assert one.lengths(text.tokens).tolist() == [
            draft_length(text.tokens, step, one) for step in range(last)
        ]


def test_shares_kept_are_counted_by_place_and_depth(tuning):
    """Against a count of its own; 200 tests of one bin leave little to lean on."""
    (text, *_) = tuning.texts
    place_T = text.places([STOP])
    ends = [-1, *(step for step, token in enumerate(text.tokens) if token == STOP)]
    assert place_T.tolist() == [
        step - 1 - max(end for end in ends if end < step) for step in range(len(text.tokens))
    ]
    one = text.tested[3]
    many = replace(text, tested=(replace(one, kept=True),) * 150 + (replace(one, kept=False),) * 50)
    acceptance = Acceptance.of([many], [STOP])
    rate = acceptance.rate_X[bins(place_T[one.step], np.array(one.depth))]
    assert rate == pytest.approx(0.75, abs=0.01)


def test_the_best_setting_is_that_of_every_path(tuning):
    """Of some schedules, the chain's best has the least bytes of all that brute force sums up."""
    (text, *_) = tuning.texts
    text = replace(text, tokens=text.tokens[:14], context_T=text.context_T[:14])
    small = replace(tuning, texts=[replace(text, tested=tuning.texts[0].tested[:0] + tuple(
        each for each in tuning.texts[0].tested if each.step < 14))])  # fmt: skip
    named = tuning.sets[0]
    schedules = [schedule(max_tokens=length, t_max=9) for length in range(1, 7)]
    found = small.predict(named, schedules)
    acceptance = Acceptance.of(small.texts, named.token_ids)
    place_T = text.places(named.token_ids)

    def rate(step: int, depth: int) -> float:
        return float(acceptance.rate_X[bins(place_T[step], np.array(depth))])

    spent = [brute(text, one, rate, tuning.costs, repeats=tuning.repeats)[4] for one in schedules]
    assert len({round(each) for each in spent}) > 3
    best = max(found, key=lambda each: each.outcome.speed)
    assert best.schedule == schedules[int(np.argmin(spent))]


def test_a_search_ranks_and_what_it_chose_runs(tuning):
    found = tuning.search()
    known = [one for one in found if one.outcome.known >= 0.9]
    assert found[: len(known)] == known
    speeds = [one.outcome.speed for one in known]
    assert len(known) > 5
    assert speeds == sorted(speeds, reverse=True)
    config = tuning.config(found[0])
    assert config.draft.max_tokens == found[0].schedule.max_tokens
    assert not config.draft.adaptive
    fixed = next(one for one in found if one.chosen is None)
    assert tuning.config(fixed).draft.rule == "fixed"


def test_the_recorded_run_is_summed_up_by_its_events(tmp_path):
    with ParquetObserver(tmp_path / "run") as observer:
        run = LosslessRun(observer, most=REQUESTS)
    tuning = LosslessTuning.of([Trace.open(tmp_path / "run")], axes={}, trigger_sets={})
    events, recorded = run.verifications, tuning.recorded
    assert recorded.verifications == len(events)
    assert recorded.drafted == sum(event.drafted for event in events)
    assert recorded.read_tokens == pytest.approx(sum(event.attended_tokens for event in events))
    costs, spent = tuning.costs, 0.0
    for event in events:
        length = event.base + event.drafted + 1
        spent += float(costs.slow(length))
        for depth in range(1, event.drafted + 1):
            attended = 20.0 + depth
            spent += float(costs.model.mean(event.base + depth, attended, 0, 0))
    assert recorded.bytes == pytest.approx(spent, rel=1e-6)


def test_traces_that_cannot_be_judged_are_refused(tmp_path):
    plain = make_trace(tmp_path / "plain", steps=12)
    with pytest.raises(
        TraceError, match=r"got a plain one; record it with sfi generate --lossless"
    ):
        LosslessTuning.of([Trace.open(plain)], axes={}, trigger_sets={})
    folder = tmp_path / "run"
    with ParquetObserver(folder) as observer:
        LosslessRun(observer)
    with pytest.raises(ConfigError, match="search of --lossless must be of t_max, trigger_delay"):
        LosslessTuning.of([Trace.open(folder)], axes={"span": "4"}, trigger_sets={})
    manifest = Trace.open(folder).manifest
    draft = manifest["config"]["draft"] | {"confidence": 0.5}
    change_manifest(folder, config=manifest["config"] | {"draft": draft})
    with pytest.raises(TraceError, match=r"draft.confidence, got 0.5; record it with 0"):
        LosslessTuning.of([Trace.open(folder)], axes={}, trigger_sets={})


def test_a_policy_without_boundaries_is_searched_by_length_alone(tmp_path):
    folder = tmp_path / "run"
    with ParquetObserver(folder) as observer:
        LosslessRun(observer, most=REQUESTS)
    change_manifest(folder, policy="codescan")
    tuning = LosslessTuning.of([Trace.open(folder)], axes={}, trigger_sets={})
    assert tuning.costs.slow(900.0) == tuning.costs.model.dense(900.0)  # nothing is selected anew
    found = tuning.search()
    assert {(one.chosen, one.schedule.slow_start) for one in found} == {(None, 0)}
    for given in (
        {"axes": {"t_max": "4"}, "trigger_sets": {}},
        {"axes": {}, "trigger_sets": {"a": "."}},
    ):
        with pytest.raises(ConfigError, match=r"policy must have boundaries .* got codescan"):
            LosslessTuning.of([Trace.open(folder)], **given)


def test_a_policy_that_is_not_installed_is_one_line(tmp_path):
    folder = tmp_path / "run"
    with ParquetObserver(folder) as observer:
        LosslessRun(observer)
    change_manifest(folder, policy="elsewhere")
    with pytest.raises(ConfigError, match="unknown policy 'elsewhere'"):
        LosslessTuning.of([Trace.open(folder)], axes={"t_max": "4"}, trigger_sets={})
    with pytest.raises(ConfigError, match="unknown policy 'elsewhere'"):
        LosslessTuning.of([Trace.open(folder)], axes={}, trigger_sets={}).search()
