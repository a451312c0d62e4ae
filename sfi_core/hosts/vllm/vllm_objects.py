"""Read vLLM's objects: the plugin's settings, the tokenizer, layers, the schedule."""

import shlex
from typing import Any

from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import attention_flags
from sfi_core.hosts.vllm.names import facts_of
from sfi_core.hosts.vllm.planner import Scheduled
from sfi_core.hosts.vllm.settings import PluginOptions, Settings, check_host
from sfi_core.models.load import load_tokenizer


def settings_of(vllm_config: Any) -> Settings:
    """Read the plugin's settings; raise `ConfigError` where these or vLLM's own do not fit."""
    settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check_host(facts_of(vllm_config), settings.config)
    return settings


def slot_count(vllm_config: Any, options: PluginOptions) -> int:
    """Return how many requests may be sparse at once."""
    most: int = vllm_config.scheduler_config.max_num_seqs
    return min(options.slots, most)


def impl_of(module: Any) -> Any:
    """Return the implementation of an attention layer.

    Raise `ConfigError` unless the implementation is ours, and sfi is the only connector.
    """
    if not hasattr(module.impl, "pages"):
        raise ConfigError(
            f"attention must be sfi's own, got {type(module.impl).__name__}; "
            f"add {shlex.join(attention_flags())}"
        )
    if not module.impl.manages:  # the settings that the layer saw name another connector
        raise ConfigError("sfi must be vLLM's only KV connector, got it among several")
    return module.impl


def scheduled_of(output: Any, group: int) -> Scheduled:
    """Read a `SchedulerOutput` for one KV cache group."""
    opened = {
        new.req_id: (new.block_ids[group], new.num_computed_tokens)
        for new in output.scheduled_new_reqs
    }
    grown, cached = {}, output.scheduled_cached_reqs
    for place, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[place]
        if name in cached.resumed_req_ids:
            opened[name] = (blocks[group], cached.num_computed_tokens[place])
        elif blocks is not None:
            grown[name] = blocks[group]
    lost = tuple(output.preempted_req_ids or ())
    return Scheduled(output.num_scheduled_tokens, opened, grown, lost)


def tokenizer_of(vllm_config: Any) -> Any:
    """Return the model's tokenizer; None where vLLM has none."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(
        model.tokenizer, model.tokenizer_revision, trust_remote_code=model.trust_remote_code
    )
