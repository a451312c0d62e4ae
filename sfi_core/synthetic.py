"""A cache full of random keys and values, so that decoding at a long context needs no prefill."""

from typing import Any

import torch

from sfi_core.backends import layer_step
from sfi_core.cache_seam import SfiCache
from sfi_core.layer_shapes import layer_shapes
from sfi_core.session import Session


def synthetic_cache(session: Session, context: int, capacity: int, *, seed: int = 0) -> SfiCache:
    """Make a batch-1 cache that looks as if `context` tokens had been read.

    Keys and values are standard normal; so are the queries that make the first selection. For timing
    only: the tokens that follow mean nothing.

    Args:
        session: The model under SFI; every layer must be a full-attention layer.
        context: Tokens in the cache.
        capacity: Tokens it has room for.
        seed: Seed of the random numbers.
    """
    shapes = layer_shapes(session.model, session.policy)
    cache = session.cache(capacity)
    run = session.start(cache, 1, context)
    run.begin_prefill([context], final=True)
    generator = torch.Generator(session.model.device).manual_seed(seed)
    heads = session.model.config.get_text_config(decoder=True).num_attention_heads
    for index, (layer, shape) in enumerate(zip(cache.managed, shapes, strict=True)):
        key, value = random_keys(session.model, shape.heads, shape.key_width, context, generator)
        run.append(index, key, value)
        layer.lazy_initialization(key, value)
        layer.seen = context
        window = session.policy.config.window_prefill
        query = torch.randn(
            1, shape.heads, heads // shape.heads, window, shape.key_width,
            dtype=key.dtype, device=key.device, generator=generator,
        )  # fmt: skip
        layer_step(run, index, scale=shape.key_width**-0.5).select_first(query)
    run.record([0])
    return cache


def random_keys(
    model: Any, heads: int, width: int, context: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a layer's keys and values, [1, heads, context, width] each."""
    shape = (1, heads, context, width)
    options = {"dtype": model.dtype, "device": model.device, "generator": generator}
    return torch.randn(shape, **options), torch.randn(shape, **options)
