"""What a model's layers keep of a token, whatever its architecture."""

from typing import Any

import torch

from sfi_core.engine.run import Run
from sfi_core.hosts.transformers.cache import SfiCache
from sfi_core.observers.observer import NullObserver
from sfi_core.policies import Policy
from sfi_core.state.kv_cache import KVCache
from sfi_core.state.layer_shape import LayerShape


@torch.no_grad()
def layer_shapes(model: Any, policy: Policy) -> list[LayerShape]:
    """Learn every layer's shapes from a pass over two tokens, whatever the architecture."""
    cache = SfiCache(model, 2, 2, frozenset())
    run = Run(policy, NullObserver(), KVCache(1, 2), device=model.device)
    cache.attach(run)
    model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), past_key_values=cache)
    shapes = []
    for index, layer in enumerate(cache.layers):
        pages = run.cache.layers.get(index)
        key, value = (
            (layer.keys, layer.values) if pages is None else (pages.key_PHND, pages.value_PHNE)
        )
        shapes.append(
            LayerShape(
                heads=key.shape[1],
                key_width=key.shape[3],
                value_width=value.shape[3],
                itemsize=key.itemsize,
                window=layer.sliding_window if pages is None else None,
            )
        )
    return shapes
