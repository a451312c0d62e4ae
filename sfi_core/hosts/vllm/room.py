"""Memory of sfi in vLLM's attention layers, allocated while vLLM loads the model.

vLLM loads the weights, lets each attention layer finish them (`process_weights_after_loading`), runs the
model once to measure its memory, and gives the rest to its cache. A segment that is allocated in the second
step makes the cache smaller; one that is allocated later would end in "out of memory".
"""

from typing import Any

import torch

from sfi_core.engine.run import reads_in_place
from sfi_core.errors import ConfigError
from sfi_core.hosts.vllm import CONNECTOR
from sfi_core.hosts.vllm.connector import SfiConnector
from sfi_core.hosts.vllm.names import (
    backend_of,
    get_kv_transfer_group,
    has_kv_transfer_group,
    is_full,
    layer_index,
    settings_of,
    slot_count,
)
from sfi_core.hosts.vllm.settings import Settings
from sfi_core.hosts.vllm.worker import WorkerEngine, codes_of
from sfi_core.machine.memory import resident_bytes, total_bytes
from sfi_core.sizes.memory import packed_rows
from sfi_core.sizes.policy import check_slots, norm_count
from sfi_core.state.packed_segment import PackedSegment, SegmentShape

FULL = {"full_attention", "attention", "hybrid"}  # transformers' names; hybrid layers have a state beside it


def is_configured(vllm_config: Any) -> bool:
    """Say whether vLLM's settings name our connector; one among several is refused later."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def engine_of_process() -> WorkerEngine | None:
    """Return the process's engine; None before vLLM has its caches, and without sfi."""
    group = get_kv_transfer_group() if has_kv_transfer_group() else None
    return group.engine if isinstance(group, SfiConnector) else None


def give_room(vllm_config: Any, dtype: torch.dtype) -> None:
    """Allocate the packed segments of the layers that sfi serves, their codes, and on a GPU room for norms.

    Raise `ConfigError` for segments that take more than `slots_memory` allows.
    """
    modules = vllm_config.compilation_config.static_forward_context
    impls = {name: getattr(module, "impl", None) for name, module in modules.items()}
    rooms = {name: impl for name, impl in impls.items() if getattr(impl, "manages", False)}
    served = {layer_index(n): i for n, i in rooms.items() if is_full(modules[n].get_kv_cache_spec(vllm_config))}
    settings, device = settings_of(vllm_config), torch.device(vllm_config.device_config.device)
    sparse = [layer for layer in served if layer not in settings.config.dense_layers]
    slots, longest = slot_count(vllm_config, settings.options), longest_of(vllm_config)
    for impl in rooms.values():
        impl.given = True
    if not served:
        return  # the connector refuses the model
    shape = shape_of(next(iter(served.values())), dtype, device)
    check_room(vllm_config, settings, len(sparse), shape)
    policy, backend = settings.policy, backend_of(device)
    rows = packed_rows(policy, longest)
    for layer in sparse:
        shape = shape_of(served[layer], dtype, device)
        served[layer].segment = PackedSegment(slots, rows, shape, packs=not reads_in_place(policy, backend))
        if policy.chooses:
            served[layer].codes = codes_of(shape, slots, served[layer].num_heads, longest)
    if device.type == "cuda":
        cache = vllm_config.cache_config
        share = int((total_bytes(device) or 0) * cache.gpu_memory_utilization)
        free = cache.kv_cache_memory_bytes or share - resident_bytes(device)
        for impl in served.values():
            count = norm_count(free, len(served), shape_of(impl, dtype, device))
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
    shape = SegmentShape(
        heads=model.get_num_kv_heads(parallel),
        key_width=model.get_head_size(),
        value_width=model.get_head_size(),
        dtype=model.dtype,
        device=torch.device(vllm_config.device_config.device),
    )
    check_room(vllm_config, settings, sum(kinds[layer] in FULL for layer in sparse), shape)


def check_room(vllm_config: Any, settings: Settings, layers: int, shape: SegmentShape) -> None:
    """Raise `ConfigError`, with budget and slots that fit, for slots beyond `slots_memory`.

    `layers` have a segment, with rows of `shape` in this process.
    """
    total, parallel = total_bytes(shape.device), vllm_config.parallel_config
    # the processes of one machine share its memory; each has a GPU of its own
    sharing = parallel.tensor_parallel_size if shape.device.type == "cpu" else 1
    check_slots(
        settings.policy, shape, slots=slot_count(vllm_config, settings.options), layers=layers,
        longest=longest_of(vllm_config), query_heads=vllm_config.model_config.get_num_attention_heads(parallel),
        backend=backend_of(shape.device),
        limit=None if total is None else int(total * settings.options.slots_memory) // sharing,
    )  # fmt: skip


def longest_of(vllm_config: Any) -> int:
    """Return the tokens of the longest request, in whole blocks."""
    block, longest = vllm_config.cache_config.block_size, vllm_config.model_config.max_model_len
    return int(-(-longest // block) * block)


def shape_of(impl: Any, dtype: torch.dtype, device: torch.device) -> SegmentShape:
    """Return a token's keys and values of a layer in this process."""
    return SegmentShape(
        heads=impl.num_kv_heads, key_width=impl.head_size, value_width=impl.head_size, dtype=dtype, device=device
    )
