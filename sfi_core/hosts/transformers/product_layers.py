"""`own_products(fusion)`: layers whose products with few rows are kernels of ours, four launches for eight.

The first norm is in the launch of queries, keys and values, the second and the gate in that of gate and up, and both
sums are in those of the products before them. Roundings stay where transformers has them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from sfi_core.hosts.transformers import known as sources
from sfi_core.hosts.transformers.fusion import LOOKS, Fusion, attended
from sfi_core.hosts.transformers.products import Product
from sfi_core.machine.private import has_hooks
from sfi_core.machine.threads import served
from sfi_kernels.products import MOST_ROWS


@contextmanager
def own_products(fusion: Fusion) -> Iterator[None]:
    """Inside, multiply up to 16 rows so in layers whose modules all run fused; more rows as the layers do."""
    before = {layer: layer.forward for layer in fusion.ours if _is_ours(layer, fusion)}
    for layer, plain in before.items():
        layer.forward = MethodType(_layer_forward(layer, plain), layer)
    try:
        yield
    finally:
        for layer, plain in before.items():
            layer.forward = plain


def _is_ours(layer: Any, fusion: Fusion) -> bool:
    if sources.digest(type(layer).forward) not in sources.DECODER_LAYER:
        return False
    return {layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm} <= fusion.ours


def _layer_forward(layer: Any, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    source = sources.ATTENTION[sources.digest(type(attention).forward)]
    projections = Product(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = Product(mlp.gate_proj, mlp.up_proj)
    out, down = Product(attention.o_proj), Product(mlp.down_proj)
    unheard = attention, mlp, mlp.act_fn, layer.input_layernorm, layer.post_attention_layernorm

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        few = served.get() and hidden_states.numel() <= MOST_ROWS * hidden_states.shape[-1]
        taken = few and all(product.takes(hidden_states) for product in (projections, out, gate_up, down))
        if not taken or any(map(has_hooks, unheard)):
            return plain(hidden_states, **kwargs)
        parts = projections.parts(projections.few(hidden_states, **_norm(self.input_layernorm)))
        rows, _ = attended(attention, source, parts, **kwargs)
        residual = out.few(rows, residual_XN=hidden_states)
        norm = self.post_attention_layernorm
        if (look := vars(norm).get(LOOKS)) is not None:
            look(residual)
        return down.few(gate_up.few(residual, gated=True, **_norm(norm)), residual_XN=residual)

    return forward


def _norm(norm: Any) -> dict[str, Any]:
    return {"norm_K": norm.weight, "eps": norm.variance_epsilon}
