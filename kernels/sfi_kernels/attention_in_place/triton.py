"""Attention in place in Triton: `decode_attention` with every request fast."""

import torch

from sfi_kernels.pseudo_token import PseudoToken
from sfi_kernels.sparse_attention.triton import sparse_attention


def attention_in_place(
    query_BHGD: torch.Tensor, position_BHS: torch.Tensor, length_BH: torch.Tensor,
    key_PHND: torch.Tensor, value_PHNE: torch.Tensor, block_table_BP: torch.Tensor,
    recent_start_B: torch.Tensor, length_B: torch.Tensor, *, scale: float,
    soft_cap: float | None = None, sink_HG: torch.Tensor | None = None, pseudo: PseudoToken | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `reference.attention_in_place`. Heads of at most 256 numbers, pages of multiples of 16 tokens."""
    B, H, *_ = query_BHGD.shape
    no_key, no_value = (pages.new_empty(B, H, 0, pages.shape[3]) for pages in (key_PHND, value_PHNE))
    return sparse_attention(
        query_BHGD, no_key, no_value, length_BH, key_PHND, value_PHNE, block_table_BP, recent_start_B,
        length_B, scale=scale, soft_cap=soft_cap, sink_HG=sink_HG, pseudo=pseudo, position_BHS=position_BHS,
    )  # fmt: skip
