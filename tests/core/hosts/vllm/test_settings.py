"""The settings of the plugin and of a request, without vLLM: what is taken, and what is refused."""

import pytest

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm.request_settings import RequestSettings
from sfi_core.hosts.vllm.settings import HostFacts, Settings, check_host
from sfi_core.settings.config import SfiConfig

FITS = dict.fromkeys(("speculative", "latent", "two_batches", "pooling", "asynchronous"), False)
FITS |= dict.fromkeys(("pipeline", "context_parallel", "tensor_parallel"), 1)
FITS |= {"kv_heads": 2, "cache_dtype": "auto", "dtype": "bfloat16", "other_layers": ()}


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
        ({"budget": "5"}, "budget"),
        ({"budget": 0}, "budget"),
        ({"slots": 0}, "slots"),
        ({"slots": 2.5}, "slots"),
        ({"selector": {"gama": 1}}, "gama"),
        ({"policy": "fastest"}, "fastest"),
        ({"preset": "mine"}, "mine"),
        ({"trigger_policy": "cosine"}, "cosine"),
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
        ({"speculative": True}, "speculative_config"),
        ({"pipeline": 2}, "pipeline_parallel_size"),
        ({"context_parallel": 2}, "decode_context_parallel_size"),
        ({"cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({"latent": True}, "multi-head latent attention"),
        ({"two_batches": True}, "enable_dbo"),
        ({"pooling": True}, "a pooling model"),
        ({"other_layers": ("linear_attention",)}, "layers of linear_attention"),
        ({"tensor_parallel": 4}, "more tensor-parallel processes than KV heads"),
    ],
    ids=str,
)
def test_what_of_vllm_s_settings_does_not_fit_is_refused(changes, part):
    check_host(HostFacts(**FITS), SfiConfig())
    check_host(HostFacts(**FITS | {"cache_dtype": "bfloat16"}), SfiConfig())
    with pytest.raises(ConfigError) as error:
        check_host(HostFacts(**FITS | changes), SfiConfig())
    assert one_line(error, part)


def test_asynchronous_scheduling_wants_a_delay():
    late = HostFacts(**FITS | {"asynchronous": True})
    check_host(late, SfiConfig())
    check_host(late, SfiConfig().replace(trigger_delay=0, trigger_policy="stride"))
    check_host(HostFacts(**FITS), SfiConfig().replace(trigger_delay=0))
    with pytest.raises(ConfigError) as error:
        check_host(late, SfiConfig().replace(trigger_delay=0))
    assert one_line(error, "trigger_delay must be at least 1 with async_scheduling")


@pytest.mark.parametrize(
    ("extra", "part"),
    [
        ({"sfi.budget": 5}, "sfi.budget"),
        ({"sfi.t_max": "many"}, "t_max"),
        ({"sfi.t_max": -1}, "t_max"),
        ({"sfi.enabled": 2}, "sfi.enabled"),
        ({"sfi.enabled": [1]}, "sfi.enabled"),
        ({"sfi.trigger_policy": "cosine"}, "cosine"),
    ],
    ids=str,
)
def test_wrong_settings_make_a_request_dense_and_are_told(extra, part):
    """An error in the scheduler would end the server, and all requests with it."""
    config = SfiConfig()
    settings = RequestSettings.of(extra, config, lambda _: None)
    assert not settings.enabled
    assert settings.config == config
    assert part in settings.error


def test_settings_are_salted_apart_unless_they_come_to_the_same():
    def salt(extra, policy="sfi"):
        return RequestSettings.of(extra, SfiConfig(), lambda _: None).salt(policy)

    assert salt(None) == salt({}) == salt({"sfi.t_max": SfiConfig().t_max, "other": 3})
    kinds = [salt(None), salt(None, "quest"), salt({"sfi.t_max": 5}), salt({"sfi.enabled": 0})]
    assert len(set(kinds)) == 4
    assert salt({"sfi.enabled": False, "sfi.t_max": 5}) == salt({"sfi.enabled": 0})
    assert salt({"sfi.budget": 1}) == salt({"sfi.enabled": 0})  # refused, and dense
