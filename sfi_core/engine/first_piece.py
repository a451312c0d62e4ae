"""The first piece of a prompt, by PyTorch's fused attention over its new keys; later pieces read pages.

Paper gap: the paper does not say how a prompt is read.
"""

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from sfi_core.engine.layer import Layer


def is_first_piece(layer: Layer, prompts: tuple[int, ...], query_BHGTD: torch.Tensor) -> bool:
    """Say whether these rows read first pieces that PyTorch can attend: no soft cap, no learned sinks."""
    begin = not any(layer.batch_pass.start[row] for row in prompts)
    plain = layer.options["soft_cap"] is None and layer.options["sink_HG"] is None
    return begin and plain and layer.new is not None and has_fused(query_BHGTD, *layer.new)


def has_fused(query_BHGTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor) -> bool:
    """Say whether flash attention takes these tensors; PyTorch's others hold all T x T logits."""
    if query_BHGTD.device.type != "cuda":
        return False
    operands = query_BHGTD.flatten(1, 2), key_BHTD, value_BHTE
    return can_use_flash_attention(SDPAParams(*operands, None, 0.0, True, query_BHGTD.shape[2] > 1))


def attend_to_itself(
    layer: Layer, prompts: tuple[int, ...], query_BHGTD: torch.Tensor
) -> torch.Tensor:
    """Attend causally with the first pieces in some rows; a request's tokens are the last `count` of T.

    Returns:
        out, [B, H, G, T, E]; zeros where a request has no token.
    """
    assert layer.new is not None, "the host has handed over the piece's keys"
    key, value = layer.new
    B, T, count = len(query_BHGTD), query_BHGTD.shape[3], layer.batch_pass.count
    if len(prompts) == B and all(own == T for own in count):
        return _causal(query_BHGTD, key, value, layer)
    out = query_BHGTD.new_zeros(*query_BHGTD.shape[:4], value.shape[3])
    for row in prompts:
        one, own = slice(row, row + 1), slice(T - count[row], T)
        parts = query_BHGTD[one, :, :, own], key[one, :, own], value[one, :, own]
        out[one, :, :, own] = _causal(*parts, layer)
    return out


def _causal(
    query_BHGTD: torch.Tensor, key_BHTD: torch.Tensor, value_BHTE: torch.Tensor, layer: Layer
) -> torch.Tensor:
    out = scaled_dot_product_attention(
        query_BHGTD.flatten(1, 2), key_BHTD, value_BHTE, is_causal=True,
        scale=layer.logit_options["scale"], enable_gqa=query_BHGTD.shape[2] > 1,
    )  # fmt: skip
    return out.view(*query_BHGTD.shape[:4], -1)
