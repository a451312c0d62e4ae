"""The planner without vLLM: triggers, late tokens, preemption, slots, counts; the plugin's and requests' settings."""

import logging
import random
from types import SimpleNamespace

import pytest

from sfi_core.errors import ConfigError
from sfi_core.hosts.serving.plan import NO_SLOT
from sfi_core.hosts.vllm import VERSIONS, plugin
from sfi_core.hosts.vllm.settings import RequestSettings, Settings, check_host
from sfi_core.policies.built_in.sfi import SFI
from sfi_core.settings.config import SfiConfig
from sfi_kernels.step_descriptor import SLOW
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
    report = host.run()["a"].report()
    later = [event for event in observer.steps if event.step]
    chosen = [0 if event.slow else event.context_tokens / 8 for event in later]
    assert [event.selection_tokens for event in later] == pytest.approx(chosen)
    assert host.planner.totals["selection"] == pytest.approx(sum(chosen))
    assert report["mean_selection_tokens"] == pytest.approx(sum(chosen) / len(later))
    assert report["cache_read_ratio"] == report["read_ratio"] + report["selection_ratio"] > report["read_ratio"]


def test_slow_steps_are_those_of_a_replay_of_the_recorded_tokens(tmp_path):
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
    reports = {name: tracked.report() for name, tracked in ended.items()}
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
        mates = [mate for mate in observer.steps if mate.batch_step == event.batch_step]
        assert event.graphs is None, "vLLM's own affair"
        if event.slow_requests + event.fast_requests > len(mates):
            continue  # one of them reads a piece of its prompt
        kinds.add((event.slow_requests, event.fast_requests))
        assert event.slow_requests == sum(mate.slow for mate in mates)
        assert event.cached_tokens == sum(mate.context_tokens for mate in mates)
        assert event.moved_bytes == 8 * sum(mate.attended_tokens for mate in mates)
    assert kinds >= {(0, 1), (0, 2), (1, 0), (1, 1)}


def vllm(**changes) -> SimpleNamespace:
    """Make vLLM's settings, which fit but for the changes; a name is that of one of their parts."""
    names = ("decode_context", "prefill_context", "tensor", "pipeline")
    parallel = dict.fromkeys((f"{name}_parallel_size" for name in names), 1)
    model = {"dtype": "torch.bfloat16", "use_mla": False, "runner_type": "generate"}
    model |= {"is_hybrid": False, "is_attention_free": False, "hf_text_config": SimpleNamespace()}
    parts = {
        "model_config": model | {"get_total_num_kv_heads": lambda: 2},
        "parallel_config": parallel | {"use_ubatching": False},
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "device_config": {"device_type": "cpu"},
        "scheduler_config": {"async_scheduling": False},
    }
    for name, value in changes.items():
        next((part for part in parts.values() if name in part), parts)[name] = value
    plain = {"speculative_config": parts.pop("speculative_config", None)}
    return SimpleNamespace(**plain, **{n: SimpleNamespace(**part) for n, part in parts.items()})


LINEAR = SimpleNamespace(layer_types=["full_attention", "linear_attention"])
SPARSE = SimpleNamespace(layer_types=["full_attention", "minimax_m3_sparse"])
MAMBA_2 = SimpleNamespace(layer_types=["linear_attention", "full_attention"], mamba_chunk_size=256)


def one_line(error: pytest.ExceptionInfo[ConfigError], part: str) -> bool:
    return part in str(error.value) and "\n" not in str(error.value)


def test_settings_of_the_plugin_and_of_a_run_stand_side_by_side():
    changes = {"budget": 7, "triggers": [".", "x"], "selector": {"gamma": 0.0}}
    settings = Settings.of({"policy": "quest", "preset": "paper", "slots": 3, **changes})
    assert (settings.options.policy, settings.options.slots) == ("quest", 3)
    assert settings.config == SfiConfig.preset("paper").replace(**changes)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"buget": 5}, "buget"),
        ({"slots": 0}, "slots"),
        ({"preset": "mine"}, "mine"),
        ({"policy": "synckv"}, "scheduler can plan, got synckv"),
        ({"policy": "freekv"}, "scheduler can plan, got freekv"),
        ({"trace_audit": 4}, "trace_audit"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused(given, part):
    with pytest.raises(ConfigError) as error:
        Settings.of(given)
    assert one_line(error, part)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"speculative_config": "a draft model"}, "speculative_config"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"prefill_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"use_ubatching": True}, "enable_dbo"),
        ({"runner_type": "pooling"}, "a pooling model"),
        ({"hf_text_config": SPARSE}, "layers of minimax_m3_sparse"),
        ({"is_attention_free": True}, "a model without attention"),
        ({"is_hybrid": True, "hf_text_config": MAMBA_2}, "enable_prefix_caching must be off for Mamba 2 on a CPU"),
        ({"tensor_parallel_size": 4}, "more tensor-parallel processes than KV heads"),
    ],
    ids=str,
)
def test_what_of_vllm_s_settings_does_not_fit_is_refused(changes, part):
    check_host(vllm(), SfiConfig())
    check_host(vllm(cache_dtype="bfloat16"), SfiConfig())
    check_host(vllm(is_hybrid=True, hf_text_config=LINEAR), SfiConfig())
    for fits in ({"device_type": "cuda"}, {"enable_prefix_caching": False}):
        check_host(vllm(is_hybrid=True, hf_text_config=MAMBA_2, **fits), SfiConfig())
    with pytest.raises(ConfigError) as error:
        check_host(vllm(**changes), SfiConfig())
    assert one_line(error, part)


def test_asynchronous_scheduling_wants_a_delay():
    late = vllm(async_scheduling=True)
    check_host(late, SfiConfig())
    check_host(late, SfiConfig().replace(trigger_delay=0, trigger_policy="stride"))
    check_host(vllm(), SfiConfig().replace(trigger_delay=0))
    with pytest.raises(ConfigError) as error:
        check_host(late, SfiConfig().replace(trigger_delay=0))
    assert one_line(error, "trigger_delay must be at least 1 with async_scheduling")


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"sfi.budget": 5}, "sfi.budget"), ({"sfi.t_max": "many"}, "t_max"), ({"sfi.t_max": -1}, "t_max"),
        ({"sfi.enabled": 2}, "sfi.enabled"), ({"sfi.enabled": [1]}, "sfi.enabled"),
        ({"sfi.trigger_policy": "cosine"}, "cosine"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_make_a_request_dense_and_are_told(extra, part):
    """An error in the scheduler would end the server, and all requests with it."""
    config = SfiConfig()
    settings = RequestSettings.of(extra, config, lambda _: None)
    assert not settings.enabled
    assert settings.config == config
    assert part in settings.error


NESTED = []
for _ in range(5000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: {"sfi.t_max": 10**400}, "t_max must be at most 9,007,199,254,740,992, got 1000"),
        (lambda: {"sfi.min_gap": 10**5000}, "min_gap must be at most 9,007,199,254,740,992, got int too long"),
        (lambda: {"sfi.random_rate": 10**400}, "random_rate must be float"),
        (lambda: {"sfi.trigger_policy": "x\x1b[2J" * 10**6}, "unknown trigger_policy"),
        (lambda: {"sfi." + "x" * 10**6: 1}, "is no setting of one request"),
        (lambda: {"sfi.stride": NESTED}, "list too long to show"),
        (lambda: [("sfi.t_max", 3)], "settings must be numbers, got AttributeError"),
    ],
)
def test_no_client_can_send_what_ends_the_server_or_fills_its_log(make, part):
    settings = RequestSettings.of(make(), SfiConfig(), lambda _: None)
    assert not settings.enabled
    assert part in settings.error
    assert len(settings.error) < 400
    assert settings.error.isprintable()


def test_settings_are_salted_apart_unless_they_come_to_the_same():
    def salt(extra, policy="sfi"):
        return RequestSettings.of(extra, SfiConfig(), lambda _: None).salt(policy)

    assert salt(None) == salt({}) == salt({"sfi.t_max": SfiConfig().t_max, "other": 3})
    kinds = [salt(None), salt(None, "quest"), salt({"sfi.t_max": 5}), salt({"sfi.enabled": 0})]
    assert len(set(kinds)) == 4
    assert salt({"sfi.enabled": False, "sfi.t_max": 5}) == salt({"sfi.enabled": 0})
    assert salt({"sfi.budget": 1}) == salt({"sfi.enabled": 0})  # refused, and dense


@pytest.mark.parametrize("found", ["0.31.9", "0.34.0", "unknown"])
def test_another_version_is_refused_in_one_line(found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    with pytest.raises(ConfigError, match=rf"^vLLM must be {VERSIONS} for sfi, got {found}$"):
        plugin.check_version()


@pytest.mark.parametrize("found", ["0.32.0", "0.33.1", "0.32.0+cpu"])
def test_versions_of_the_range_are_taken(found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plugin, "installed_version", lambda: found)
    plugin.check_version()


def test_the_plugin_stays_out_of_another_version(monkeypatch, caplog):
    """It imports nothing of vLLM then: a name that it needs may be missing there."""
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.28.0")
    monkeypatch.setattr(plugin, "import_module", lambda _: pytest.fail("imported"))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert [r.getMessage() for r in caplog.records] == [f"sfi stays out: vLLM must be {VERSIONS} for sfi, got 0.28.0"]


def test_slow_rows_take_turns_where_there_is_evidence_for_two():
    """Who waits longest comes first, and reads fast meanwhile; a prompt's end has its own queries, and room besides."""
    config = SfiConfig().replace(**SMALL | {"t_max": 4, "slow_start": 1})
    host = FakeScheduler(config, slots=5, evidence=2)
    for name in "abcde":
        host.add(name, 20, [5] * 12)
    steps = [host.step() for _ in range(11)]
    slow = [[name for name, e in entries.items() if e.decode and e.request_pass.kind == SLOW] for entries in steps]
    assert slow == [[]] * 6 + [["a", "b"], ["c", "d"], ["e"], [], []]
    assert all(e.selects == (e.request_pass.kind == SLOW) for entries in steps[2:] for e in entries.values())
    assert [sum(e.selects for e in entries.values()) for entries in steps[:2]] == [0, 5]  # by the prompts' own queries
    reports = {name: ended.report() for name, ended in host.run().items()}
    assert [reports[name]["slow_at"] for name in "ae"] == [[0, 5, 10], [0, 7]]
    assert reports["e"]["reasons"] == {"first": 1, "t_max": 1}
