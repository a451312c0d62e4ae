"""The shapes of a model's keys and values, from a pass over two tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.hosts.transformers.cache_name import CACHE_NAME
from sfi_core.hosts.transformers.checks import check_supported
from sfi_core.hosts.transformers.own_layers import of_own_kind, states
from sfi_core.machine.private import attention_implementation
from sfi_core.state.layer_shape import LayerShape

NAME = "sfi-probe"
Arrived = tuple[torch.Tensor, torch.Tensor, int]  # keys, values, and the number of query heads


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of every layer's keys and values as they reach the attention, and its states.

    Latents are expanded by then. A model on the meta device computes nothing. Raise `UnsupportedModelError`
    where SFI cannot act, or where without weights the pass depends on data.
    """
    cache = SfiCache(model, None, None, frozenset())
    arrived, reads = probe(model, cache), cache.owners
    if missed := [layer.index for layer in cache.managed if layer.index not in arrived]:
        raise UnsupportedModelError(
            f"{cache.name} has layers {missed} that do not attend through transformers' attention interface"
        )
    return [
        _shape(model, cache.layers[reads.get(index, index)], arrived.get(index), reads.get(index))
        for index in range(max(len(cache.layers) - 1, *arrived) + 1)
    ]


def cached_shapes(model: Any) -> list[LayerShape]:
    """Return the shapes of a token in transformers' own cache, layer by layer."""
    return [
        _shape(model, layer, None if getattr(layer, "keys", None) is None else (layer.keys, layer.values, 0), None)
        for layer in cached_layers(model, 1)
    ]


def cached_layers(model: Any, batch: int) -> list[Any]:
    """Return transformers' own cache layers after two tokens of `batch` requests."""
    cache = of_own_kind(DynamicCache(config=model.config.get_text_config(decoder=True)), model)
    probe(model, cache, (torch.zeros(batch, 2, dtype=torch.long, device=model.device), None))
    layers: list[Any] = cache.layers
    return layers


@torch.no_grad()
def probe(model: Any, cache: Any, *passes: tuple[torch.Tensor, torch.Tensor | None]) -> dict[int, Arrived]:
    """Run a model with an attention that only looks at what arrives; return that by full-attention or window layer.

    A pass has tokens, and the mask of all tokens so far; without any, one pass reads two tokens. `cache` is ours or
    transformers'; of the latter nothing is looked at.
    """
    check_supported(model)
    arrived: dict[int, Arrived] = {}
    no_run: Any = object()  # no layer gets that far

    def look(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        B, heads, T = query.shape[:3]
        if isinstance(cache, SfiCache):
            index, layer = cache.attending(module) or (module.layer_idx, None)
            arrived[index] = key, value, heads
            if layer is not None:
                layer.pending = False
        return value.new_zeros(B, T, heads, value.shape[3]), None

    AttentionInterface.register(NAME, look)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    previous = attention_implementation(model.config)
    passes = passes or ((torch.zeros(1, 2, dtype=torch.long, device=model.device), None),)
    weightless = model.device.type == "meta"
    model.set_attn_implementation(NAME)
    try:
        with _without_experts(model) if weightless else nullcontext():
            for ids_BT, mask in passes:
                if isinstance(cache, SfiCache):
                    cache.attach(no_run)
                model(input_ids=ids_BT, attention_mask=mask, use_cache=True, **{CACHE_NAME: cache})
    except (RuntimeError, NotImplementedError) as error:
        if not weightless:
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} must show its shapes without weights; its forward pass depends on data"
        ) from error
    finally:
        model.set_attn_implementation(previous)
    return arrived


def _shape(model: Any, layer: Any, arrived: Arrived | None, owner: int | None) -> LayerShape:
    # of a cache layer, where keys, values and query heads have arrived
    state_bytes = sum(state[:1].nbytes for _, _, state in states(layer)) if owner is None else 0
    if arrived is None:
        return LayerShape(
            heads=0, key_width=0, value_width=0, itemsize=model.dtype.itemsize, window=0, state_bytes=state_bytes
        )
    key, value, query_heads = arrived
    return LayerShape(
        heads=key.shape[1], key_width=key.shape[3], value_width=value.shape[3], itemsize=key.itemsize,
        window=layer.sliding_window if layer.is_sliding else None, query_heads=query_heads,
        state_bytes=state_bytes, owner=owner,
    )  # fmt: skip


@contextmanager
def _without_experts(model: Any) -> Iterator[None]:
    # to which experts a token goes would be data
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for module in experts:
        module.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        for module in experts:
            del module.forward
