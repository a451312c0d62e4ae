"""The planner without vLLM: the trigger rule, late tokens, preemption, slots, and what it counts."""

import random
from pathlib import Path

import pytest

from sfi_core.hosts.vllm.planner import NO_SLOT
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.settings.config import SfiConfig
from sfi_traces.model.trace import Trace
from sfi_traces.replay import Setting, Supports, schedule
from tests.core.hosts.vllm.scheduling import BLOCK, STOP, FakeScheduler
from tests.fakes import RecordingObserver
from tests.traces import made

SMALL = {"budget": 20, "recent": 8, "sink": 2, "t_max": 9}


def draw_tokens(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice([STOP, 5, 6, 7, 8, 9]) for _ in range(count)]


def expected(tokens: list[int], config: SfiConfig, resumed: int = 0) -> list[int]:
    """Eq. 5 and T_max, written out anew: the steps that are slow; so is one that resumes."""
    slow = [0]
    for step in range(1, len(tokens)):
        back, gap = step - 1 - config.trigger_delay, step - slow[-1]
        triggered = back >= 0 and tokens[back] == STOP and gap >= config.min_gap
        if step < config.slow_start or triggered or gap > config.t_max or step == resumed:
            slow.append(step)
    return slow


@pytest.mark.parametrize("late", [False, True], ids=["known", "late"])
@pytest.mark.parametrize(
    "changes", [{}, {"trigger_delay": 2}, {"slow_start": 4, "min_gap": 0}, {"t_max": 3, "min_gap": 8}], ids=str
)
def test_slow_steps_follow_the_rule(changes, late):
    """Asynchronous scheduling plans a step before the last token is known: a delay of 1 needs no more."""
    config = SfiConfig().replace(**SMALL | changes)
    scripts = {str(i): draw_tokens(i, 20 + 17 * i) for i in range(5)}
    host = FakeScheduler(config, slots=5, late=late)
    for name, script in scripts.items():
        host.add(name, 3 + 13 * int(name), script)
        host.step()
    ended = host.run()
    for name, script in scripts.items():
        assert ended[name].state.tokens == script
        assert ended[name].report()["slow_at"] == expected(script, config), name
        assert ended[name].report()["fast_steps"] > 0
    totals = host.planner.totals
    assert totals["slow_steps"] + totals["fast_steps"] == sum(map(len, scripts.values()))
    assert totals["requests"] == 5


def test_what_choosing_reads_counts_for_each_answer_and_the_server(monkeypatch):
    """A quarter of the cache in one of two layers, on fast steps: an eighth in the mean."""
    monkeypatch.setattr(SFI, "selection_tokens", lambda _, state: state.length / 4)
    observer = RecordingObserver()
    host = FakeScheduler(SfiConfig().replace(**SMALL, dense_layers=(1,)), observer=observer)
    host.add("a", 40, draw_tokens(1, 30))
    told = host.run()["a"].report()
    later = [one for one in observer.steps if one.step]
    chosen = [0 if one.slow else one.context_tokens / 8 for one in later]
    assert [one.selection_tokens for one in later] == pytest.approx(chosen)
    assert host.planner.totals["selection"] == pytest.approx(sum(chosen))
    assert told["mean_selection_tokens"] == pytest.approx(sum(chosen) / len(later))
    assert told["cache_read_ratio"] == told["read_ratio"] + told["selection_ratio"] > told["read_ratio"]


def test_slow_steps_are_those_of_a_replay_of_the_recorded_tokens(tmp_path: Path):
    trace = Trace.open(made.make_trace(tmp_path / "trace", steps=80))
    supports = Supports.load(trace)[0]
    for changes in ({}, {"min_gap": 0, "t_max": 7}, {"trigger_policy": "random"}):
        config = SfiConfig().replace(**SMALL | changes)
        reasons = schedule(supports, Setting(config=config, trigger_token_ids=frozenset({STOP})))
        host = FakeScheduler(config)
        host.add("a", supports.prompt_tokens, [int(token) for token in supports.tokens])
        report = host.run()["a"].report()
        assert report["slow_at"] == [step for step, reason in enumerate(reasons) if reason]
        assert sum(report["reasons"].values()) == len(report["slow_at"])


def test_entries_say_where_each_token_goes():
    host = FakeScheduler(SfiConfig().replace(**SMALL))
    host.add("a", 25, draw_tokens(1, 4))
    entries = [host.step()["a"] for _ in range(6)]
    assert [(e.start, e.count) for e in entries] == [(0, 10), (10, 10), (20, 5), (25, 1), (26, 1), (27, 1)]
    assert [e.decode for e in entries] == [False] * 3 + [True] * 3
    assert [e.request_pass.ends_prompt for e in entries] == [False, False, True] + [False] * 3
    assert [e.opens for e in entries] == [True] + [False] * 5
    assert [e.step for e in entries] == [0, 0, 0, 1, 2, 3]
    assert [e.block for e in entries] == [1 + (e.start + e.count - 1) // BLOCK for e in entries]
    assert len({e.slot for e in entries}) == 1


@pytest.mark.parametrize("late", [False, True], ids=["known", "late"])
@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
def test_a_preempted_request_goes_on_with_a_slow_step(late, dropped):
    """vLLM may drop the token of the step under way: that step is then planned anew."""
    config = SfiConfig().replace(**SMALL)
    script = draw_tokens(2, 40)
    host = FakeScheduler(config, late=late)
    host.add("a", 30, script)
    for _ in range(13 if late and dropped else 12):
        host.step()
    if not dropped:
        host.settle()
    at = len(host.live["a"].output_token_ids)
    host.preempt("a")
    entries = [host.step()["a"] for _ in range(5)]
    assert [e.decode for e in entries] == [False] * 4 + [True]
    assert [e.request_pass.ends_prompt for e in entries] == [False, False, False, True, False]
    assert [e.generated for e in entries] == [at, 0, 0, 0, 0]
    assert entries[3].step == at
    report = host.run()["a"].report()
    assert report["preempted"] == 1
    assert report["reasons"]["resumed"] == 1
    assert report["slow_at"] == expected(script, config, resumed=at)
    assert report["slow_steps"] + report["fast_steps"] == len(script)


def test_a_request_preempted_within_its_prompt_begins_anew():
    host = FakeScheduler(SfiConfig().replace(**SMALL))
    host.add("a", 35, draw_tokens(3, 20))
    first = host.step()["a"]
    host.step()
    host.preempt("a")
    entries = [host.step()["a"] for _ in range(5)]
    assert [e.opens for e in entries] == [True] + [False] * 4
    assert [(e.start, e.request_pass.ends_prompt) for e in entries[:4]] == [
        (0, False), (10, False), (20, False), (30, True),
    ]  # fmt: skip
    assert first.slot == entries[0].slot
    report = host.run()["a"].report()
    assert report["preempted"] == 1
    assert report["slow_at"] == expected(draw_tokens(3, 20), host.config)
    assert report["reasons"]["first"] == 2  # nothing had been generated that it could resume


def test_the_workers_are_told_of_a_slot_that_is_free_before_it_is_given_again():
    host = FakeScheduler(SfiConfig().replace(**SMALL), slots=1)
    host.add("a", 5, draw_tokens(1, 3))
    host.add("b", 5, draw_tokens(2, 9))
    host.add("c", 5, draw_tokens(3, 9))
    assert [e.slot for e in host.step(["a", "b"]).values()] == [0, NO_SLOT]
    while "a" in host.live:
        host.step(["a", "b"])
    freed = []
    plan = host.planner.plan
    host.planner.plan = lambda scheduled: (freed.append(plan(scheduled)), freed[-1])[1]
    assert host.step(["b", "c"])["c"].slot == 0
    assert freed[0].freed == [0]


def test_requests_without_a_slot_are_dense_and_counted_apart():
    host = FakeScheduler(SfiConfig().replace(**SMALL), slots=2)
    for name in "abcd":
        host.add(name, 20, draw_tokens(ord(name), 30))
    ended = host.run()
    reports = {name: one.report() for name, one in ended.items()}
    assert [reports[name]["dense_steps"] for name in "abcd"] == [0, 0, 29, 29]
    assert reports["c"]["read_ratio"] == 1
    assert reports["a"]["read_ratio"] < 1
    assert host.planner.totals["dense_steps"] == 58
    assert sorted(host.planner.free) == [0, 1]
    assert not host.planner.tracked


def test_aborts_at_every_stage_leave_nothing():
    host = FakeScheduler(SfiConfig().replace(**SMALL), slots=3)
    for name in ("waiting", "reading", "decoding", "survivor"):
        host.add(name, 25, draw_tokens(7, 30))
    host.end("waiting")
    host.step(["reading", "decoding", "survivor"])
    host.end("reading")
    for _ in range(6):
        host.step()
    host.end("decoding")
    assert host.run()["survivor"].report()["slow_at"] == expected(draw_tokens(7, 30), host.config)
    assert sorted(host.planner.free) == [0, 1, 2]
    assert not host.planner.tracked
    assert host.planner.finish("decoding") is None


def test_settings_of_one_request_change_its_steps_alone():
    script = draw_tokens(4, 50)
    host = FakeScheduler(SfiConfig().replace(**SMALL))
    host.add("plain", 20, script)
    host.add("dense", 20, script, enabled=0)
    host.add("other", 20, script, t_max=2, trigger_policy="t-max")
    host.add("wrong", 20, script, budget=5)
    ended = host.run()
    assert ended["plain"].report()["slow_at"] == expected(script, host.config)
    assert ended["other"].report()["slow_at"] == [0, 1, *range(4, 50, 3)]
    assert ended["dense"].report()["dense_steps"] == 49
    assert ended["wrong"].report()["dense_steps"] == 49
    assert "sfi.budget is no setting of one request" in ended["wrong"].report()["error"]


@pytest.mark.parametrize("late", [False, True])
def test_steps_know_what_the_engine_s_step_reads_for_all_its_requests(late):
    observer = RecordingObserver()
    config = SfiConfig().replace(**SMALL, dense_layers=(1,))
    host = FakeScheduler(config, late=late, observer=observer)
    host.planner.row_bytes = 8
    host.add("a", 40, draw_tokens(1, 30))
    host.add("b", 55, draw_tokens(2, 12))
    host.run()
    kinds = set()
    for event in observer.steps:
        mates = [one for one in observer.steps if one.batch_step == event.batch_step]
        assert event.graphs is None, "vLLM's own affair"
        if event.slow_requests + event.fast_requests > len(mates):
            continue  # one of them reads a piece of its prompt
        kinds.add((event.slow_requests, event.fast_requests))
        assert event.slow_requests == sum(one.slow for one in mates)
        assert event.cached_tokens == sum(one.context_tokens for one in mates)
        assert event.moved_bytes == 8 * sum(one.attended_tokens for one in mates)
    assert kinds >= {(0, 1), (0, 2), (1, 0), (1, 1)}
