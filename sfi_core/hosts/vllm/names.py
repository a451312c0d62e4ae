"""The names of vLLM that the connector uses, and readers of vLLM's objects."""

import re
import shlex
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import attention_flags
from sfi_core.hosts.vllm.planner import Scheduled
from sfi_core.hosts.vllm.settings import PluginOptions, Settings, check_host
from sfi_core.models.load import load_tokenizer
from sfi_core.policies import policy_class
from sfi_core.state.layer_shape import LayerShape
from sfi_core.triggers.trigger import resolve_triggers

__all__ = [
    "AttentionBackendEnum", "KVConnectorBase_V1", "KVConnectorFactory", "KVConnectorMetadata",
    "KVConnectorPromMetrics", "KVConnectorRole", "KVConnectorStats", "KVConnectorWorkerMetadata",
    "SupportsHMA", "get_kv_transfer_group", "has_kv_transfer_group", "register_backend",
]  # fmt: skip


# what vLLM may keep of layers beside full attention
OTHERS = (MambaSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def tensor_parallel_ranks() -> Ranks:
    """Return the processes that share this worker's model."""
    group = get_tp_group()
    return ALONE if group.world_size == 1 else Ranks(group.rank_in_group, group.world_size, group.device_group)


def layer_index(name: str) -> int:
    """Return a transformer layer's number, given the name of its attention."""
    return int(re.findall(r"\.(\d+)\.", name)[0])


def layer_shapes(cache: Any, config: Any) -> list[LayerShape]:
    """Return each layer's shape, over all tensor-parallel processes; one without a cache has no heads and no states."""
    ranks, count = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_hidden_layers()
    none = LayerShape(heads=0, key_width=0, value_width=0, itemsize=config.model_config.dtype.itemsize, window=0)
    shapes, states = [none] * count, [0] * count
    for group in cache.kv_cache_groups:
        for name in group.layer_names:
            # vLLM numbers the state beside attention in a layer from `count` on
            layer, spec = layer_index(name) % count, group.kv_cache_spec
            if isinstance(spec, MambaSpec):
                states[layer] += spec.state_content_size_bytes * ranks
                continue
            shapes[layer] = LayerShape(
                heads=spec.num_kv_heads * ranks,
                key_width=spec.head_size,
                value_width=getattr(spec, "head_size_v", None) or spec.head_size,
                itemsize=spec.dtype.itemsize,
                window=getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
            )
    return [replace(shape, state_bytes=size) for shape, size in zip(shapes, states, strict=True)]


def is_full(spec: Any) -> bool:
    """Say whether a layer, or a group of layers, attends to everything and caches that."""
    whole = isinstance(spec, FullAttentionSpec)
    return whole and spec.sliding_window is None and spec.attention_chunk_size is None


def full_group(groups: Any) -> tuple[int, list[str]]:
    """Return the number of the only full-attention KV cache group, and its layers' names.

    vLLM keeps the others: windows, chunks, and states of linear attention, state spaces and convolutions. Raise
    `ConfigError` for no such group, or several, and for a group of an unknown kind.
    """
    found = []
    for number, group in enumerate(groups):
        spec, names = group.kv_cache_spec, list(group.layer_names)
        if is_full(spec):
            found.append((number, names))
        elif not isinstance(spec, OTHERS):
            raise ConfigError(f"sfi does not run in vLLM with a {type(spec).__name__}, that of {names[0]}")
    if len(found) != 1:
        named = ": " + " and ".join(names[0] for _, names in found) if found else ""
        raise ConfigError(
            f"model must have one group of full-attention layers for sfi in vLLM, got {len(found)}{named}"
        )
    return found[0]


def settings_of(vllm_config: Any) -> Settings:
    """Read the plugin's settings; raise `ConfigError` where these or vLLM's own do not fit."""
    settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check_host(vllm_config, settings.config)
    return settings


def backend_of(device: Any) -> str:
    """Return our backend that runs on a device."""
    return "torch" if device.type == "cpu" else "triton"


def slot_count(vllm_config: Any, options: PluginOptions) -> int:
    """Return how many requests may be sparse at once."""
    return min(options.slots, int(vllm_config.scheduler_config.max_num_seqs))


def impl_of(module: Any) -> Any:
    """Return the implementation of an attention layer.

    Raise `ConfigError` unless the implementation is ours, and sfi is the only connector.
    """
    if not hasattr(module.impl, "pages"):
        raise ConfigError(
            f"attention must be sfi's own, got {type(module.impl).__name__}; add {shlex.join(attention_flags())}"
        )
    if not module.impl.manages:  # the settings that the layer saw name another connector
        raise ConfigError("sfi must be vLLM's only KV connector, got it among several")
    return module.impl


def scheduled_of(output: Any, group: int) -> Scheduled:
    """Read a `SchedulerOutput` for one KV cache group."""
    opened = {new.req_id: (new.block_ids[group], new.num_computed_tokens) for new in output.scheduled_new_reqs}
    grown, cached = {}, output.scheduled_cached_reqs
    for place, name in enumerate(cached.req_ids):
        blocks = cached.new_block_ids[place]
        if name in cached.resumed_req_ids:
            opened[name] = (blocks[group], cached.num_computed_tokens[place])
        elif blocks is not None:
            grown[name] = blocks[group]
    return Scheduled(output.num_scheduled_tokens, opened, grown, tuple(output.preempted_req_ids or ()))


def tokenizer_of(vllm_config: Any) -> Any:
    """Return the model's tokenizer; None where vLLM has none."""
    model = vllm_config.model_config
    if model.skip_tokenizer_init:
        return None
    return load_tokenizer(model.tokenizer, model.tokenizer_revision, trust_remote_code=model.trust_remote_code)


def trigger_ids(vllm_config: Any, settings: Settings) -> tuple[int, ...]:
    """Return T_trig as token ids; raise `ConfigError` as `resolve_triggers`."""
    needed = policy_class(settings.options.policy).triggered
    return resolve_triggers(tokenizer_of(vllm_config), settings.config, needed=needed)
