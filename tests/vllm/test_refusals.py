"""What the plugin refuses of vLLM's own settings: one line, when the server starts."""

from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm.names import settings_of
from sfi_core.models.load import BUNDLED
from tests.vllm.engines import SMALL_BATCH, engine
from tests.vllm.test_models import wide


def checked(extra: dict[str, Any], **options: Any) -> None:
    """Read the settings as the connector does, from vLLM's own, without a model."""
    transfer = {"kv_connector": "SfiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    given = {"dtype": "float32", "kv_transfer_config": transfer} | options
    late = given.pop("async_scheduling", False)
    made = EngineArgs(model=str(BUNDLED), **given).create_engine_config()
    made.scheduler_config.async_scheduling = late  # which vLLM turns off on a CPU
    settings_of(made)


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("extra", "options", "part"),
    [
        ({}, {"speculative_config": NGRAM}, "speculative_config"),
        ({}, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype fp8"),
        ({}, {"tensor_parallel_size": 4}, "more tensor-parallel processes than KV heads"),
        ({"trigger_delay": 0}, {"async_scheduling": True}, "trigger_delay must be at least 1"),
        ({"policy": "freekv"}, {}, "got freekv"),
        ({}, {"runner": "pooling"}, "a pooling model"),
        (
            {},
            {"hf_overrides": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2}},
            "layers of minimax_m3_sparse",
        ),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_settings_that_do_not_fit_are_refused(extra, options, part):
    with pytest.raises(ConfigError) as error:
        checked(extra, **options)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_one_of_several_connectors_is_refused():
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "SfiConnector", "kv_role": "kv_both"}]},
    }
    told = "sfi must be vLLM's only KV connector"
    with pytest.raises(ConfigError, match=told), engine(None, kv_transfer_config=several):
        pass


def test_what_fits_is_taken():
    checked({"trigger_delay": 0}, async_scheduling=False)
    checked({"trigger_delay": 1}, async_scheduling=True)


def test_an_unknown_setting_stops_the_server_at_its_start():
    with pytest.raises(ConfigError, match=r"^[^\n]*buget[^\n]*$"), engine({"buget": 5}):
        pass


def test_a_model_that_only_slides_is_refused(tmp_path: Path):
    wide("Mistral 7B v0.1").build().save_pretrained(tmp_path)
    options = {"model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 512}
    wanted = r"^model must have one group of full-attention layers for sfi in vLLM, got 0$"
    settings = {"trigger_token_ids": [3], "budget": 32}
    with pytest.raises(ConfigError, match=wanted), engine(settings, **SMALL_BATCH, **options):
        pass
