"""What `sfi serve` refuses once it knows vLLM and the model: one line, before a server starts."""

import json

import pytest

from sfi_cli.commands.serve import Service
from sfi_cli.settings import given
from sfi_core.errors import SfiError
from sfi_core.hosts.vllm.server import Server
from sfi_core.settings.config import SfiConfig


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
