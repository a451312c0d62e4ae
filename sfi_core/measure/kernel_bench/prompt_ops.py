"""Variants of a prompt's first and last piece, for one request; the rival is PyTorch's SDPA."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.measure.kernel_bench import bytes_moved
from sfi_core.measure.kernel_bench.data import LayerData
from sfi_core.measure.kernel_bench.variant import KernelVariant, reason
from sfi_kernels.dense_attention import dense_attention

Call = Callable[[], torch.Tensor]
CHECKED = 16  # queries of a piece that the check computes


def prompt(layer: LayerData, _: None) -> Iterator[KernelVariant]:
    """Yield the first piece of a prompt and the last piece, each followed by its rival."""
    settings = layer.settings
    first, last = settings.piece(layer.device), settings.piece(layer.device, last=True)
    for name, W, tokens in (("prompt", first, first), ("prompt.piece", last, settings.context)):
        query = layer.draw_queries(1, W)
        yield _variant(layer, name, query, tokens, _ours(layer, query, tokens))
        rival = _rival(layer, query, tokens)
        try:
            rival()
        except (RuntimeError, ValueError, TypeError) as error:
            layer.notes.append(f"{name}.sdpa does not run here: {reason(error)}")
            continue
        yield _variant(layer, f"{name}.sdpa", query, tokens, rival, rival=True)


def checked_queries(count: int) -> list[int]:
    """Return the queries of a piece that are checked: evenly spread, including the first and the last."""
    return sorted({round(at * (count - 1) / (CHECKED - 1)) for at in range(CHECKED)})


def _variant(
    layer: LayerData, name: str, query_1HGWD: torch.Tensor, tokens: int, call: Call, *, rival: bool = False
) -> KernelVariant:
    W = query_1HGWD.shape[3]

    def error() -> float:
        return layer.causal_error(call(), query_1HGWD, checked_queries(W), tokens, rival=rival)

    form, flops = f"{W:,} queries over {tokens:,} tokens", bytes_moved.prompt_flops(layer.settings, W, tokens)
    moved, shape = bytes_moved.prompt_bytes(layer.settings, W, tokens), {"context": tokens, "batch": 1}
    return KernelVariant(name, None, call, moved, error, form, flops, shape)


def _ours(layer: LayerData, query: torch.Tensor, tokens: int) -> Call:
    keys, values, table = layer.paged
    operands = query, keys, values, table[:1], torch.full_like(layer.length_B[:1], tokens)
    return partial(dense_attention.on(layer.backend), *operands, scale=layer.settings.scale)


def _rival(layer: LayerData, query_1HGWD: torch.Tensor, tokens: int) -> Call:
    W, settings = query_1HGWD.shape[3], layer.settings
    heads = query_1HGWD.flatten(1, 2)
    key, value = (x[:1, :, :tokens].contiguous() for x in (layer.key_BHTD, layer.value_BHTD))
    # a bias that PyTorch's flash attention does not materialize; a whole prompt needs none
    causal = {"is_causal": True} if tokens == W else {"attn_mask": causal_lower_right(W, tokens)}
    options: dict[str, Any] = {"scale": settings.scale, "enable_gqa": settings.group > 1, **causal}
    return lambda: scaled_dot_product_attention(heads, key, value, **options).view_as(query_1HGWD)
