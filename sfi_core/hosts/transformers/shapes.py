"""The shapes of a model's keys and values, without its weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sfi_core.errors import UnsupportedModelError
from sfi_core.hosts.transformers.cache import check_supported
from sfi_core.state.layer_shape import LayerShape

NAME = "sfi-probe"


@torch.no_grad()
def layer_shapes_without_weights(model: Any) -> list[LayerShape]:
    """Learn every layer's shapes from a pass over two tokens on the meta device, where nothing is computed.

    What counts is what arrives at the attention, expanded from latents where the model keeps those. Experts
    are left out: which ones a token goes to would be data.

    Raises:
        UnsupportedModelError: SFI cannot act on the model, or its pass depends on data.
    """
    check_supported(model)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        seen[module.layer_idx] = key, value
        B, heads, T = query.shape[:3]
        return value.new_empty(B, T, heads, value.shape[3]), None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    ids_BT = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    try:
        with _without_experts(model):
            model(input_ids=ids_BT, past_key_values=cache, use_cache=True)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} must show its shapes without weights; its forward pass depends on data"
        ) from error
    windows = [layer.sliding_window if layer.is_sliding else None for layer in cache.layers]
    return [
        LayerShape(
            heads=key.shape[1],
            key_width=key.shape[3],
            value_width=value.shape[3],
            itemsize=key.itemsize,
            window=windows[index],
        )
        for index, (key, value) in sorted(seen.items())
    ]


@contextmanager
def _without_experts(model: Any) -> Iterator[None]:
    experts = [module for name, module in model.named_modules() if name.endswith(".experts")]
    for module in experts:
        module.forward = lambda hidden, *_, **__: hidden
    try:
        yield
    finally:
        for module in experts:
            del module.forward
