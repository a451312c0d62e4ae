"""What the plugin reads of vLLM's objects, and the memory that it takes in vLLM's attention layers."""

import shlex
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from sfi_core.distributed.ranks import ALONE, Ranks
from sfi_core.errors import ConfigError
from sfi_core.hosts.serving.rows import evidence_numbers
from sfi_core.hosts.vllm import CONNECTOR, attention_flags
from sfi_core.hosts.vllm.settings import PluginOptions, Settings, check_host
from sfi_core.machine.memory import resident_bytes, total_bytes
from sfi_core.models.load import load_tokenizer
from sfi_core.policies import policy_class
from sfi_core.sizes.memory import FLOAT32, packed_rows
from sfi_core.sizes.policy import check_slots, norm_count
from sfi_core.state.layer_pages import LayerShape, PackedSegment
from sfi_core.triggers.trigger import resolve_triggers

# what vLLM may keep of layers beside full attention
OTHERS = (MambaSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
FULL = {"full_attention", "attention", "hybrid"}  # transformers' names; hybrid layers have a state beside it


def tensor_parallel_ranks() -> Ranks:
    """Return the processes that share this worker's model."""
    group = get_tp_group()
    return ALONE if group.world_size == 1 else Ranks(group.rank_in_group, group.world_size, group.device_group)


def layer_shapes(cache: Any, config: Any) -> list[LayerShape]:
    """Return each layer's shape, over all tensor-parallel processes; one without a cache has no heads and no states."""
    ranks, count = config.parallel_config.tensor_parallel_size, config.model_config.get_total_num_hidden_layers()
    none = LayerShape(heads=0, key_width=0, value_width=0, itemsize=config.model_config.dtype.itemsize, window=0)
    shapes = [none] * count
    for name, spec in ((name, group.kv_cache_spec) for group in cache.kv_cache_groups for name in group.layer_names):
        layer = extract_layer_index(name) % count  # vLLM numbers the state beside attention in a layer from `count` on
        shape = shapes[layer]
        if isinstance(spec, MambaSpec):
            size = shape.state_bytes + spec.state_content_size_bytes * ranks
            shapes[layer] = replace(shape, state_bytes=size)
        else:
            shapes[layer] = replace(
                shape, heads=spec.num_kv_heads * ranks, key_width=spec.head_size,
                value_width=getattr(spec, "head_size_v", None) or spec.head_size, itemsize=spec.dtype.itemsize,
                window=getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None),
            )  # fmt: skip
    return shapes


def is_full(spec: Any) -> bool:
    """Say whether a layer, or a group of layers, attends to everything and caches that."""
    whole = isinstance(spec, FullAttentionSpec)
    return whole and spec.sliding_window is None and spec.attention_chunk_size is None


def full_group(groups: Any) -> tuple[int, list[str]]:
    """Return the number and the layers' names of the only full-attention group; raise `ConfigError` without one."""
    whole = [(number, list(group.layer_names)) for number, group in enumerate(groups) if is_full(group.kv_cache_spec)]
    for group in groups:
        if not (is_full(spec := group.kv_cache_spec) or isinstance(spec, OTHERS)):
            raise ConfigError(f"sfi does not run in vLLM with a {type(spec).__name__}, that of {group.layer_names[0]}")
    if len(whole) != 1:
        named = " and ".join(names[0] for _, names in whole)
        got = f"{len(whole)}: {named}" if named else "0"
        raise ConfigError(f"model must have one group of full-attention layers for sfi in vLLM, got {got}")
    return whole[0]


def settings_of(vllm_config: Any) -> Settings:
    """Read the plugin's settings; raise `ConfigError` where these or vLLM's own do not fit."""
    settings = Settings.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check_host(vllm_config, settings.config)
    if settings.options.trace is not None:
        if vllm_config.parallel_config.data_parallel_size > 1:
            raise ConfigError("trace must be of one engine, got data_parallel_size above 1")
        if (kind := vllm_config.model_config.quantization) is not None:
            raise ConfigError(f"trace must be of weights that are not quantized, got quantization={kind}")
    return settings


def backend_of(device: Any) -> str:
    """Return our backend that runs on a device."""
    return "torch" if device.type == "cpu" else "triton"


def slot_count(vllm_config: Any, options: PluginOptions) -> int:
    """Return how many requests may be sparse at once."""
    return min(options.slots, int(vllm_config.scheduler_config.max_num_seqs))


def impl_of(module: Any) -> Any:
    """Return an attention layer's implementation; raise `ConfigError` unless it is ours, and sfi the only connector."""
    if not hasattr(module.impl, "pages"):
        raise ConfigError(
            f"attention must be sfi's own, got {type(module.impl).__name__}; add {shlex.join(attention_flags())}"
        )
    if not module.impl.manages:  # the settings that the layer saw name another connector
        raise ConfigError("sfi must be vLLM's only KV connector, got it among several")
    return module.impl


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


def is_configured(vllm_config: Any) -> bool:
    """Say whether vLLM's settings name our connector; one among several is refused later."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def evidence_of(vllm_config: Any, settings: Settings, query_heads: int) -> int:
    """Return the float32 numbers of a layer's evidence in a CUDA graph: none on a CPU, or where no step selects."""
    held = backend_of(torch.device(vllm_config.device_config.device)) == "triton" and settings.policy.refreshes()
    return evidence_numbers(query_heads, longest_of(vllm_config)) if held else 0


def give_room(vllm_config: Any, dtype: torch.dtype) -> None:
    """Allocate the packed segments of the layers that sfi serves, their codes, and on a GPU room for norms.

    vLLM loads the weights, lets each attention layer finish them, runs the model once to measure its memory, and gives
    the rest to its cache. Segments that are allocated in the second step make the cache smaller; later ones would end
    in "out of memory". Raise `ConfigError` for segments that take more than `slots_memory` allows.
    """
    modules = vllm_config.compilation_config.static_forward_context
    managed = {
        name: layer for name, layer in modules.items() if getattr(getattr(layer, "impl", None), "manages", False)
    }
    whole = {name: layer.impl for name, layer in managed.items() if is_full(layer.get_kv_cache_spec(vllm_config))}
    served = {extract_layer_index(name): impl for name, impl in whole.items()}
    for module in managed.values():
        module.impl.given = True
    if not served:
        return  # the connector refuses the model
    settings, device = settings_of(vllm_config), torch.device(vllm_config.device_config.device)
    sparse = [impl for layer, impl in served.items() if layer not in settings.config.dense_layers]
    first = next(iter(served.values()))
    check_room(vllm_config, settings, len(sparse), first.num_kv_heads, first.head_size)
    slots, longest = slot_count(vllm_config, settings.options), longest_of(vllm_config)
    policy, rows = settings.policy, packed_rows(settings.policy, longest)
    for impl in sparse:
        key_PHND = torch.empty(0, impl.num_kv_heads, 1, impl.head_size, dtype=dtype, device=device)
        like, group = (key_PHND, key_PHND), impl.num_heads // impl.num_kv_heads  # a value is as wide as a key
        impl.segment = PackedSegment(slots, rows, *like, packs=not policy.chooses)
        impl.kept = policy.companion.keeps(slots, group, *like, longest)
        if numbers := evidence_of(vllm_config, settings, impl.num_heads):
            impl.evidence = torch.empty(numbers, dtype=torch.float32, device=device)
    if device.type == "cuda":
        cache = vllm_config.cache_config
        share = int((total_bytes(device) or 0) * cache.gpu_memory_utilization)
        free = cache.kv_cache_memory_bytes or share - resident_bytes(device)
        for impl in served.values():
            count = norm_count(free, len(served), 2 * impl.head_size * dtype.itemsize)
            impl.norm_X = torch.empty(count, dtype=torch.float32, device=device)


def check_model(vllm_config: Any, settings: Settings) -> None:
    """Raise `ConfigError` for no full attention, or too little room, before any weight is read."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_text_config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if kinds is None:
        if model.is_hybrid or model.get_sliding_window() is not None:
            return  # which layers have a state or the window, only the model's code says
        kinds = ["attention"] * model.get_num_layers(parallel)
    if not FULL.intersection(kinds):
        raise ConfigError(f"model must have full-attention layers for sfi, got {sorted(set(kinds))}")
    sparse = set(range(len(kinds))).difference(settings.config.dense_layers)
    layers = sum(kinds[layer] in FULL for layer in sparse)
    check_room(vllm_config, settings, layers, model.get_num_kv_heads(parallel), model.get_head_size())


def check_room(vllm_config: Any, settings: Settings, layers: int, heads: int, width: int) -> None:
    """Raise `ConfigError`, with what fits, for slots of `layers` of so many KV heads beyond `slots_memory`."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device, query_heads = torch.device(vllm_config.device_config.device), model.get_num_attention_heads(parallel)
    # the processes of one machine share its memory; each has a GPU of its own
    total, sharing = total_bytes(device), parallel.tensor_parallel_size if device.type == "cpu" else 1
    shape = LayerShape(
        heads=heads, key_width=width, value_width=width, itemsize=model.dtype.itemsize, query_heads=query_heads
    )
    check_slots(
        settings.policy, shape, slots=slot_count(vllm_config, settings.options), layers=layers,
        longest=longest_of(vllm_config),
        limit=None if total is None else int(total * settings.options.slots_memory) // sharing,
        beside=layers * evidence_of(vllm_config, settings, query_heads) * FLOAT32,
    )  # fmt: skip


def longest_of(vllm_config: Any) -> int:
    """Return the tokens of the longest request, in whole blocks."""
    block, longest = vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len
    return int(-(-longest // block) * block)
