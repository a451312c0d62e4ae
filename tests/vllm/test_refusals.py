"""What the plugin and `sfi serve` refuse of vLLM's own settings and names: one line, before a server starts."""

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from sfi_cli.commands.serve import Service
from sfi_cli.settings import given
from sfi_core.errors import ConfigError, SfiError
from sfi_core.hosts.vllm import plugin
from sfi_core.hosts.vllm.names import settings_of
from sfi_core.hosts.vllm.server import Server
from sfi_core.models.load import BUNDLED
from sfi_core.settings.config import SfiConfig
from tests.vllm.engines import SMALL_BATCH, engine
from tests.vllm.test_models import wide


def checked(extra: dict[str, Any], **options: Any) -> None:
    """Read the settings as the connector does, from vLLM's own, without a model."""
    transfer = {"kv_connector": "SfiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    arguments = {"dtype": "float32", "kv_transfer_config": transfer} | options
    late = arguments.pop("async_scheduling", False)
    vllm_config = EngineArgs(model=str(BUNDLED), **arguments).create_engine_config()
    vllm_config.scheduler_config.async_scheduling = late  # which vLLM turns off on a CPU
    settings_of(vllm_config)


@pytest.mark.parametrize(
    ("extra", "options", "part"),
    [
        ({}, {"tensor_parallel_size": 4}, "more tensor-parallel processes than KV heads"),
        ({"trigger_delay": 0}, {"async_scheduling": True}, "trigger_delay must be at least 1"),
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
    message = "sfi must be vLLM's only KV connector"
    with pytest.raises(ConfigError, match=message), engine(None, kv_transfer_config=several):
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


def words(*flags: str, policy: str = "sfi", **settings) -> list[str]:
    return Service(
        given("serve", base=SfiConfig().replace(**settings)), {"policy": policy, "slots": 4}, None,
        "127.0.0.1:8000", None, ("--max-model-len=2048", *flags),
    ).words()  # fmt: skip


DRAFTS = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3})


# what the model's config says instead
ALL_SLIDE = "--hf-overrides=" + json.dumps({"layer_types": ["sliding_attention"] * 4})
MANY_HEADS = "--hf-overrides=" + json.dumps({"num_key_value_heads": 20_000, "num_attention_heads": 20_000})


@pytest.mark.parametrize(
    ("flags", "policy", "settings", "told"),
    [
        ([ALL_SLIDE], "sfi", {}, "must have full-attention layers for sfi, got .'sliding_attention'"),
        (["--max-model-len=8192", MANY_HEADS], "sfi", {"budget": 8000}, "set budget to at most"),
        (["--nope=3"], "sfi", {}, "vLLM's flags: unrecognized arguments: --nope"),
        (["--max-model-len=many"], "sfi", {}, "vLLM's flags: argument --max-model-len"),
        (["--max-model-len=999999"], "sfi", {}, "vLLM: .*max_model_len"),
        ([f"--speculative-config={DRAFTS}"], "sfi", {}, "speculative_config"),
        (["--kv-cache-dtype=fp8"], "sfi", {}, "fp8"),
        ([], "freekv", {}, "scheduler can plan, got freekv"),
        (["Qwen/Qwen3-0.6B"], "sfi", {}, "give the model as --model before --, got 'Qwen/Qwen3-0.6B'"),
        (["--headless"], "sfi", {}, "without --headless"),
        (["--api-server-count=2"], "sfi", {}, "api_server_count must be 1"),
        (["--pipeline-parallel-size=2"], "sfi", {}, "pipeline_parallel_size above 1"),
        ([], "sfi", {"triggers": ("no token ends so",)}, "trigger"),
        (["--tokenizer=/nowhere/to/be/found"], "sfi", {}, "^folder of tokenizer /nowhere/to/be/found does not exist$"),
        (["--hf-config-path=./nowhere"], "sfi", {}, "^folder of hf_config_path ./nowhere does not exist$"),
    ],
)
def test_refused_in_one_line(flags, policy, settings, told):
    with pytest.raises(SfiError, match=told) as caught:
        Server.of(words(*flags, policy=policy, **settings))
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named_before_the_hub_s_library_sees_it(monkeypatch):
    """Offline vLLM asks that library first, which says how an id must look."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SfiError, match=r"^folder of tokenizer /nowhere/to/be/found does not exist$"):
        Server.of(words("--tokenizer=/nowhere/to/be/found"))


def test_what_fits_is_known_before_the_server_starts():
    server = Server.of(words("--max-num-seqs=3", budget=77))
    assert server.settings.config == SfiConfig().replace(budget=77)
    assert server.vllm.scheduler_config.max_num_seqs == 3
    assert server.args.served_model_name == ["bundled"]
    assert len(server.trigger_ids) == 8


FOLDER = Path(plugin.__file__).parent


def takes_from_vllm(path: Path) -> bool:
    nodes = ast.walk(ast.parse(path.read_text()))
    modules = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return any(module.split(".")[0] == "vllm" for module in modules)


FILES = sorted(path.stem for path in FOLDER.glob("*.py") if takes_from_vllm(path))


@pytest.mark.parametrize("name", FILES)
def test_every_name_that_a_file_takes_from_vllm_exists(name: str):
    importlib.import_module(f"sfi_core.hosts.vllm.{name}")
    assert {"names", "backend", "server"} <= set(FILES)


def test_the_installed_version_is_found():
    assert plugin.installed_version() != "unknown"
