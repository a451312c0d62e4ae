"""The settings of the plugin and of a request, without vLLM: what is taken, and what is refused."""

import logging
from types import SimpleNamespace

import pytest

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import VERSIONS, plugin
from sfi_core.hosts.vllm.settings import RequestSettings, Settings, check_host
from sfi_core.settings.config import SfiConfig


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
