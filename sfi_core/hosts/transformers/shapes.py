"""The shapes of a model's keys and values, from a pass over two tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.cache_name import CACHE_NAME
from sfi_core.hosts.transformers.checks import check_supported
from sfi_core.machine.private import attention_implementation
from sfi_core.state.layer_shape import LayerShape

NAME = "sfi-probe"
Arrived = tuple[torch.Tensor, torch.Tensor, int]  # keys, values, and the number of query heads


def layer_shapes(model: Any) -> list[LayerShape]:
    """Return the shape of every layer's keys and values as they reach the attention.

    Latents are expanded by then. A model on the meta device computes nothing. Raise `UnsupportedModelError`
    where SFI cannot act, or where without weights the pass depends on data.
    """
    arrived, cache = _probe(model)
    windows = [layer.sliding_window if layer.is_sliding else None for layer in cache.layers]
    shapes = []
    for index, (key, value, query_heads) in sorted(arrived.items()):
        shapes.append(_shape(key, value, windows[index], query_heads))
    return shapes


def cached_shapes(model: Any) -> list[LayerShape]:
    """Return the shapes of a token in transformers' own cache, layer by layer."""
    _, cache = _probe(model)
    return [
        _shape(layer.keys, layer.values, layer.sliding_window if layer.is_sliding else None) for layer in cache.layers
    ]


@torch.no_grad()
def _probe(model: Any) -> tuple[dict[int, Arrived], Any]:
    # run the model with an attention that only looks at what arrives
    check_supported(model)
    arrived: dict[int, Arrived] = {}

    def look(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        B, heads, T = query.shape[:3]
        arrived[module.layer_idx] = key, value, heads
        return value.new_zeros(B, T, heads, value.shape[3]), None

    AttentionInterface.register(NAME, look)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    previous = attention_implementation(model.config)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids_BT = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    weightless = model.device.type == "meta"
    model.set_attn_implementation(NAME)
    try:
        with _without_experts(model) if weightless else nullcontext():
            model(input_ids=ids_BT, use_cache=True, **{CACHE_NAME: cache})
    except (RuntimeError, NotImplementedError) as error:
        if not weightless:
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} must show its shapes without weights; its forward pass depends on data"
        ) from error
    finally:
        model.set_attn_implementation(previous)
    return arrived, cache


def _shape(key: torch.Tensor, value: torch.Tensor, window: int | None, query_heads: int = 0) -> LayerShape:
    return LayerShape(
        heads=key.shape[1], key_width=key.shape[3], value_width=value.shape[3],
        itemsize=key.itemsize, window=window, query_heads=query_heads,
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
