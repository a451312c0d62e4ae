"""Every name of vLLM that the plugin uses, so that another version's change shows in one place.

vLLM calls the plugin; vLLM itself is unchanged. tests/vllm/test_names.py checks that each name exists.
"""

import re
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
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm.settings import HostFacts
from sfi_core.state.layer_shape import LayerShape

__all__ = [
    "AttentionBackendEnum", "AttentionSpec", "FullAttentionSpec", "KVConnectorBase_V1", "KVConnectorFactory",
    "KVConnectorMetadata", "KVConnectorPromMetrics", "KVConnectorRole", "KVConnectorStats",
    "KVConnectorWorkerMetadata", "SupportsHMA", "facts_of", "full_group", "get_kv_transfer_group",
    "has_kv_transfer_group", "layer_index", "layer_shapes", "register_backend", "tensor_parallel_ranks",
]  # fmt: skip

SERVED = {"full_attention", "sliding_attention"}  # transformers' names


def tensor_parallel_ranks() -> Ranks:
    """Return the processes that share this worker's model."""
    group = get_tp_group()
    if group.world_size == 1:
        return ALONE
    return Ranks(group.rank_in_group, group.world_size, group.device_group)


def facts_of(config: Any) -> HostFacts:
    """Read those of vLLM's settings that the plugin checks."""
    model, parallel = config.model_config, config.parallel_config
    return HostFacts(
        speculative=config.speculative_config is not None,
        pipeline=parallel.pipeline_parallel_size,
        context_parallel=max(
            parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size
        ),
        tensor_parallel=parallel.tensor_parallel_size,
        kv_heads=model.get_total_num_kv_heads(),
        cache_dtype=str(config.cache_config.cache_dtype),
        dtype=str(model.dtype).removeprefix("torch."),
        latent=bool(model.use_mla),
        two_batches=bool(parallel.use_ubatching),
        pooling=model.runner_type == "pooling",
        other_layers=other_layers(model),
        asynchronous=bool(config.scheduler_config.async_scheduling),
    )


def other_layers(model: Any) -> tuple[str, ...]:
    """Return the kinds of layers other than full attention and sliding windows."""
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ()) - SERVED
    if model.is_hybrid or model.is_attention_free:
        kinds.add("state-space")
    return tuple(sorted(kinds))


def layer_index(name: str) -> int:
    """Return a transformer layer's number, given the name of its attention."""
    return int(re.findall(r"\.(\d+)\.", name)[0])


def layer_shapes(cache: Any, config: Any) -> list[LayerShape]:
    """Return each layer's shape, over all tensor-parallel processes.

    Raise `ConfigError` for a layer that caches something else than keys and values.
    """
    ranks = config.parallel_config.tensor_parallel_size
    found = {}
    for group in cache.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            if not isinstance(spec, AttentionSpec):
                raise ConfigError(f"trace must be of layers with keys and values, got {spec}")
            found[layer_index(name)] = LayerShape(
                heads=spec.num_kv_heads * ranks,
                key_width=spec.head_size,
                value_width=getattr(spec, "head_size_v", None) or spec.head_size,
                itemsize=spec.dtype.itemsize,
                window=getattr(spec, "sliding_window", None),
            )
    return [found[layer] for layer in sorted(found)]


def full_group(groups: Any) -> tuple[int, list[str]]:
    """Return the number of the only full-attention KV cache group, and its layers' names.

    Raise `ConfigError` for no such group, or several.
    """
    found = [
        (number, list(group.layer_names))
        for number, group in enumerate(groups)
        if isinstance(group.kv_cache_spec, FullAttentionSpec)
        and group.kv_cache_spec.sliding_window is None
        and group.kv_cache_spec.attention_chunk_size is None
    ]
    if len(found) != 1:
        raise ConfigError(
            f"model must have one group of full-attention layers for sfi in vLLM, got {len(found)}"
        )
    return found[0]
