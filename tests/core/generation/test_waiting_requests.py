"""Continuous batching: requests that wait take the place of those that ended, and get what they get alone."""

from collections import Counter
from functools import cache

import pytest

from sfi_core import AuditConfig, EngineOptions, NullObserver, Sampling, Session, SfiConfig, generate
from sfi_core.errors import ConfigError, NumericsError
from tests.architectures import prompts, tiny
from tests.covering import each_value, first
from tests.fakes import RecordingObserver, break_logits, tokens

pytestmark = pytest.mark.seam

BOUNDARIES = tuple(range(0, 300, 6))
SMALL = SfiConfig(
    slow_start=1, min_gap=0, span=0, sink=2, recent=6, budget=5, t_max=4, stride=3, window_prefill=8,
    trigger_token_ids=BOUNDARIES,
)  # fmt: skip
# shorter and longer than the windows of 12 tokens of Gemma 2 and GPT-OSS; the fifth is the longest by far
ROWS = prompts(9, 37, 3, 24, 60, 5, 16)
LIMITS = [7, 3, 12, 1, 9, 14, 5]
WAYS = {
    "sfi": {},
    "full-kv": {"policy": "full-kv"},
    "snapkv": {"policy": "snapkv"},
    "quest": {"policy": "quest"},
    "codescan": {"policy": "codescan"},
    "sliding": {"config": SMALL.replace(recent_mode="sliding")},
}


def pieces(tokens):
    return EngineOptions(prefill_chunk=tokens)


def run(label, rows, limits, **options):
    settings = {"config": SMALL, "stop_token_ids": (), **options}
    return generate(tiny(label), None, rows, max_new_tokens=limits, **settings)


def reports(label, rows=ROWS, limits=LIMITS, **options):
    return run(label, rows, limits, **options).report.requests


@cache
def alone(label, way):
    return [reports(label, [row], [limit], **WAYS[way])[0] for row, limit in zip(ROWS, LIMITS, strict=True)]


@pytest.mark.parametrize(
    ("label", "max_batch"),
    first(
        each_value(["llama", "qwen3", "granite-4", "gemma-2", "gpt-oss", "gpt-2", "deepseek-v3"], [2, 3, None, 1]), 3
    ),
)
def test_a_request_gets_what_it_gets_alone(label, max_batch):
    assert reports(label, max_batch=max_batch) == alone(label, "sfi")


@pytest.mark.parametrize("way", first(WAYS, 2))
def test_it_does_under_every_kind_of_policy_and_trigger(way):
    expected = alone("gemma-2", way)
    assert reports("gemma-2", max_batch=2, engine=pieces(10), **WAYS[way]) == expected
    assert reports("gemma-2", max_batch=3, page_size=16, **WAYS[way]) == expected


def test_the_slow_steps_of_those_requests_differ():
    assert len({tuple(request.slow_at) for request in alone("gemma-2", "sfi")}) > 3


def test_a_stop_token_gives_its_place_away():
    stop = alone("qwen3", "sfi")[2].token_ids[2]
    expected = [
        reports("qwen3", [row], [limit], stop_token_ids=[stop])[0] for row, limit in zip(ROWS, LIMITS, strict=True)
    ]
    assert {request.finish_reason for request in expected} == {"stop", "length"}
    assert reports("qwen3", max_batch=2, stop_token_ids=[stop]) == expected


def test_every_request_may_end_with_its_first_token():
    result = run("qwen3", ROWS, 1, max_batch=2)
    assert tokens(result) == [request.token_ids[:1] for request in alone("qwen3", "sfi")]
    assert result.report.decode_seconds == 0


@pytest.mark.parametrize(("max_batch", "slots"), [(None, 7), (3, 3), (100, 7)])
def test_no_more_run_together_than_asked_for(max_batch, slots):
    observer = RecordingObserver()
    result = run("qwen3", ROWS, LIMITS, max_batch=max_batch, observers=[observer])
    assert result.slots == slots
    assert (observer.runs[0].batch, observer.runs[0].requests) == (slots, 7)
    assert max(len(event.slow) + len(event.fast) for event in observer.begun) == slots


def test_a_place_is_taken_as_soon_as_it_is_free():
    """Two places: 0 and 1 begin; 1 ends after 3 tokens, 2 takes its place, ..."""
    observer = RecordingObserver()
    run("qwen3", ROWS, LIMITS, max_batch=2, observers=[observer])
    running = [{*event.slow, *event.fast} for event in observer.begun if not event.reads_prompt]
    expected, left, waiting = [], dict(zip((0, 1), LIMITS, strict=False)), [*range(2, 7)]
    left = {request: limit - 1 for request, limit in left.items()}
    while left:
        expected.append(set(left))
        left = {request: limit - 1 for request, limit in left.items() if limit > 1}
        while len(left) < 2 and waiting:
            request = waiting.pop(0)
            if LIMITS[request] > 1:
                left[request] = LIMITS[request] - 1
    assert running == expected


def test_events_carry_the_request_and_its_own_step():
    observer = RecordingObserver()
    result = run("qwen3", ROWS, LIMITS, max_batch=2, observers=[observer])
    for number, request in enumerate(result.report.requests):
        events = [event for event in observer.steps if event.request == number]
        assert [event.step for event in events] == list(range(LIMITS[number]))
        assert [event.token_id for event in events] == request.token_ids
        assert [event.step for event in events if event.slow] == request.slow_at
        assert Counter(event.reason for event in events if event.slow) == request.reasons
        assert all(bool(event.reason) == event.slow for event in events)
        assert events[0].position == request.prompt_tokens - 1
        chosen = [(event.step, event.layer) for event in observer.selections if event.request == number]
        assert sorted(chosen) == [(step, layer) for step in request.slow_at for layer in (0, 1)]
        read = [
            token
            for event in observer.prompts
            for row, owner in enumerate(event.requests)
            if owner == number
            for token in event.ids_BT[row, event.ids_BT.shape[1] - event.count[row] :].tolist()
        ]
        assert read == ROWS[number]


def test_every_pass_is_a_step_of_the_batch():
    observer = RecordingObserver()
    run("qwen3", ROWS, LIMITS, max_batch=2, engine=pieces(16), observers=[observer])
    steps = [event.step for event in observer.begun]
    assert steps[:4] == [-1, -1, 0, 1]
    assert steps == sorted(steps)
    for begun in observer.begun:
        stepped = {e.request for e in observer.steps if e.batch_step == begun.step}
        assert begun.step < 0 or stepped == {*begun.slow, *begun.fast}
        first = {e.step == 0 for e in observer.steps if e.batch_step == begun.step}
        assert begun.step < 0 or first == {begun.reads_prompt}


def test_tokens_are_shown_by_prompt_as_they_come():
    shown = []
    result = run("qwen3", ROWS, LIMITS, max_batch=2, on_token=shown.append)
    assert {len(row) for row in shown} == {7}
    for number, request in enumerate(result.report.requests):
        column = [row[number] for row in shown]
        assert [token for token in column if token is not None] == request.token_ids


def test_a_sampled_request_gets_what_it_gets_in_any_batch():
    hot = {"sampling": Sampling(temperature=1.5, repetition_penalty=1.3), "seed": 5}
    together = reports("qwen3", **hot)
    for max_batch in (1, 2, 3):
        assert reports("qwen3", max_batch=max_batch, **hot) == together
    assert reports("qwen3", **{**hot, "seed": 6}) != together
    assert reports("qwen3", seed=6) == alone("qwen3", "sfi"), "greedy"
    assert [r.token_ids for r in together] != [r.token_ids for r in alone("qwen3", "sfi")]


@pytest.fixture
def runs(monkeypatch):
    """The runs of a test, as they begin, and `caches`, what transformers sees of them."""

    class Made(list):
        def __init__(self):
            self.caches = []

    runs, start = Made(), Session.start

    def noted(session, cache, *args, **options):
        runs.caches.append(cache)
        runs.append(start(session, cache, *args, **options))
        return runs[-1]

    monkeypatch.setattr(Session, "start", noted)
    return runs


class Watch(NullObserver):
    def __init__(self, look):
        self.seen, self._look = [], look

    def on_step(self, event):
        self.seen.append(self._look())


def test_memory_is_allocated_once_and_prompts_are_read_into_it(runs):
    """Nothing is copied: the pages are the run's all along."""

    def pages():
        key_PHND = runs[0].store.layers[0].key_PHND
        return key_PHND.data_ptr(), key_PHND.shape[0], key_PHND.shape[2]

    watch = Watch(pages)
    run("qwen3", ROWS, LIMITS, max_batch=2, observers=[watch])
    assert len(runs) == 1
    assert {seen[1:] for seen in watch.seen} == {(2, 69)}  # 69: the longest prompt and its tokens
    assert len(set(watch.seen)) == 1


def test_padding_goes_with_the_request_that_needed_it(runs):
    """transformers counts in padded tokens; after a long request they would only grow."""
    watch = Watch(lambda: (runs.caches[-1].seen, max(s.length for s in runs[0].requests)))
    run("gemma-2", [ROWS[4], *ROWS[:3]], [2, 4, 3, 5], max_batch=1, observers=[watch])
    assert [seen for seen, _ in watch.seen] == [60, 61, 61, 10, 11, 12, 12, 38, 39, 39, 4, 5, 6, 7]


def test_a_request_that_leaves_takes_its_notes_and_audited_queries_along(runs):
    """A file of any length needs the memory of its slots."""
    for records in (lambda: runs[0].notes, lambda: runs[0].watchers[0].queries):
        runs.clear()
        watch = Watch(lambda records=records: {request for request, _ in records()})
        options = {"policy": "codescan", "audit": AuditConfig(every=2, top=4)}
        run("qwen3", ROWS, LIMITS, max_batch=2, observers=[watch], **options)
        assert max(map(len, watch.seen)) == 2
        assert set().union(*watch.seen) == set(range(7))


def test_times_add_up_to_each_requests_wait():
    result = run("qwen3", ROWS, LIMITS, max_batch=2)
    requests = result.report.requests
    assert [request.queued_seconds > 0 for request in requests] == [False] * 2 + [True] * 5
    assert all(request.prefill_seconds > 0 for request in requests)
    assert [request.decode_seconds > 0 for request in requests] == [limit > 1 for limit in LIMITS]
    ends = [r.queued_seconds + r.prefill_seconds + r.decode_seconds for r in requests]
    report = result.report
    assert max(ends) >= 0.99 * (report.prefill_seconds + report.decode_seconds)
    first = requests[0].prefill_seconds  # 0 and 1 are read together
    later = sum(request.prefill_seconds for request in requests[2:])
    assert report.prefill_seconds == pytest.approx(first + later)
    decoded = sum(limit - 1 for limit in LIMITS)
    assert report.decode_tokens_per_second == pytest.approx(decoded / report.decode_seconds)


def interrupt_after(count):
    shown = []

    def on_token(token_B):
        shown.append(token_B)
        if len(shown) == count:
            raise KeyboardInterrupt

    return on_token


def test_ctrl_c_keeps_what_ended_and_lists_what_never_began():
    result = run("qwen3", ROWS, LIMITS, max_batch=2, on_token=interrupt_after(6))
    requests = result.report.requests
    # after 3 steps 1 has ended and 2 begun, whose first token is shown by itself; 3 more steps
    assert [len(request.token_ids) for request in requests] == [5, 3, 3, 0, 0, 0, 0]
    ends = [request.finish_reason for request in requests]
    assert ends == ["interrupted", "length", *["interrupted"] * 5]
    assert [request.prompt_tokens for request in requests] == [len(row) for row in ROWS]
    assert [request.token_ids for request in requests] == [
        whole.token_ids[: len(request.token_ids)]
        for whole, request in zip(alone("qwen3", "sfi"), requests, strict=True)
    ]
    assert result.interrupted
    assert result.texts == [""] * 7


def test_ctrl_c_while_a_prompt_is_read_keeps_the_others():
    shown = []

    def stop_in_the_third_prompt():
        if len(shown) == 3:
            raise KeyboardInterrupt

    with break_logits(tiny("qwen3"), stop_in_the_third_prompt):
        result = run("qwen3", ROWS, LIMITS, max_batch=2, on_token=shown.append, engine=pieces(2))
    requests = result.report.requests
    assert [len(request.token_ids) for request in requests] == [3, 3, *[0] * 5]
    ends = [request.finish_reason for request in requests]
    assert ends == ["interrupted", "length", *["interrupted"] * 5]
    assert [request.prompt_tokens for request in requests] == [len(row) for row in ROWS]


@pytest.mark.parametrize(("passes", "place"), [(6, "at step 5 in request 0"), (3, "at step 0 in request 2")])
def test_broken_logits_name_the_request_and_its_own_step(passes, place):
    shown = []
    with break_logits(tiny("qwen3"), lambda: len(shown) == passes):
        result = run("qwen3", ROWS, LIMITS, max_batch=2, on_token=shown.append)
    assert isinstance(result.error, NumericsError)
    assert str(result.error).endswith(place)
    reasons = [request.finish_reason for request in result.report.requests]
    assert reasons == ["error", "length", "error", *["interrupted"] * 4]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([3, 3], "max_new_tokens must be one for all or 7, one a prompt, got 2"),
        ([3, 3, 3, 0, 3, 3, 3], "max_new_tokens must be positive, got 0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    with pytest.raises(ConfigError) as refusal:
        run("qwen3", ROWS, limits)
    assert str(refusal.value) == message
